from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from te_convert.plan.model import Decision, Outcome
from te_convert.reasons import Reason
from te_convert.report.tree import MAX_DEPTH, MAX_OPEN, Branch, build_tree
from tests.report.sample_reports import HOSTILE, linear, norm, other, success

WORDS = ("", "a", "b", "0", "1", "2", "07")  # of the names in the property test


def walk(branch: Branch) -> Iterator[Branch]:
    yield branch
    for child in branch.children:
        yield from walk(child)


def tree_of(*decisions: Decision) -> Branch:
    return build_tree(decisions, "Net")


def names(branch: Branch) -> list[str]:
    return [found.name for found in walk(branch)]


def visible(branch: Branch) -> int:
    """Lines that a reader sees before anything is unfolded."""
    inside = sum(map(visible, branch.children)) + (len(branch.leaves) if branch.children else 0)
    return 1 + (inside if branch.is_open else 0)


def layers(*changed: int, of: int = 4, **changes: object) -> list[Decision]:
    found = []
    for index in range(of):
        found += [norm(f"layers.{index}.norm"), linear(f"layers.{index}.fc", **(changes if index in changed else {}))]  # type: ignore[arg-type]
    return found


def test_equal_layers_are_folded_with_their_sums() -> None:
    tree = tree_of(*layers())
    assert names(tree) == ["Net", "layers", "0–3", "norm", "fc"]
    folded = tree.children[0].children[0]
    assert (folded.times, folded.count, folded.outcomes) == (4, 4, ((Outcome.CONVERTED, 8),))
    assert (folded.children[1].leaves[0].params, folded.children[1].leaves[0].count) == ("4× 147.8 k", 4)


def test_a_layer_that_differs_stands_alone() -> None:
    for changes in (
        {"outcome": Outcome.REFUSED},
        {"class_name": "Odd"},
        {"kind": "Conv1D"},
        {"params": 1},
        {"precision": "high"},
        {"reasons": (Reason("x.y", "", ""),)},
        {"fused_into": "layers.1.other"},
        {"spec": None},
    ):
        tree = tree_of(*layers(1, **changes))
        assert [child.name for child in tree.children[0].children] == ["0, 2–3", "1"], changes


def test_layers_that_differ_in_calls_and_details_are_folded() -> None:
    for changes in ({"calls": 7}, {"shapes": ()}):
        assert names(tree_of(*layers(1, **changes)))[2] == "0–3"
    reasons = [linear(f"e.{i}", Outcome.REFUSED, Reason("a.b", f"expert {i}", "")) for i in range(3)]
    assert names(tree_of(*reasons)) == ["Net", "e", "0–2"]


def test_what_layers_were_fused_into_is_named_relative_to_them() -> None:
    fused = [linear(f"layers.{i}.attn.q", Outcome.FUSED, fused_into=f"layers.{i}.attn.qkv") for i in range(3)]
    leaf = tree_of(*fused).children[0].children[0].children[0].leaves[0]
    assert (leaf.count, leaf.fused_into) == (3, "qkv")


def test_experts_are_folded_inside_folded_layers() -> None:
    tree = tree_of(*(linear(f"layers.{i}.experts.{j}.w") for i in range(3) for j in range(8)))
    assert names(tree) == ["Net", "layers", "0–2", "experts", "0–7", "w"]
    assert [branch.count for branch in walk(tree)][-1] == 24


def test_names_that_only_look_like_numbers_are_not_folded() -> None:
    tree = tree_of(*(linear(f"a.{part}.w") for part in ("01", "1", "²", "0000000001", "9999999999")))
    assert sum("–" in name for name in names(tree)) == 0
    assert len(tree.children[0].children) == 5


def test_a_module_may_be_a_site_and_hold_sites() -> None:
    tree = tree_of(other("block", "Block"), linear("block.fc"), linear(""))
    assert [len(branch.leaves) for branch in walk(tree)] == [1, 1, 1]
    assert tree.outcomes == ((Outcome.CONVERTED, 2), (Outcome.NO_MATCH, 1))


def test_deep_and_hostile_names_do_no_harm() -> None:
    deep = ".".join("ab"[i % 2] for i in range(5000))
    tree = tree_of(linear(deep), linear(deep.replace("b", "c", 1)), linear(HOSTILE), linear("..", Outcome.REFUSED))
    assert dict(tree.outcomes) == {Outcome.CONVERTED: 3, Outcome.REFUSED: 1}

    def depth(branch: Branch) -> int:
        return 1 + max(map(depth, branch.children), default=0)

    assert depth(tree) <= MAX_DEPTH + 2
    assert all(name.isprintable() for name in names(tree))


def test_a_small_tree_opens_unfolded_and_a_large_one_by_levels() -> None:
    assert all(branch.is_open for branch in walk(build_tree(success().sites, "Net")))
    tree = tree_of(*(linear(f"part{i}.stage{j}.w{k}") for i in range(6) for j in range(7) for k in range(9)))
    assert tree.is_open
    assert not tree.children[0].children[0].is_open
    assert visible(tree) <= MAX_OPEN + 1


@settings(deadline=None)
@given(st.sets(st.integers(0, len(WORDS) ** 4 - 1), max_size=30), st.integers(0, 4))
def test_every_site_is_in_exactly_one_leaf(numbers: set[int], shift: int) -> None:
    outcomes = [*Outcome]
    sites = {}
    for number in numbers:
        parts = [WORDS[number // len(WORDS) ** place % len(WORDS)] for place in range(4)]
        fqn = ".".join(part for part in parts if part)
        sites[fqn] = linear(fqn, outcomes[(number % 3 + shift) % len(outcomes)])
    tree = build_tree(list(sites.values()), "Net")
    counts: Counter[Outcome] = Counter()
    for branch in walk(tree):
        for leaf in branch.leaves:
            counts[leaf.outcome] += leaf.count
    assert counts == Counter(site.outcome for site in sites.values()) == Counter(dict(tree.outcomes))
