"""What users of this package's peers reported: each entry is proved by tests that carry its mark.

A test says ``@pytest.mark.report("owner/name#number")``; an entry counts as proved by every test that names one of its
references.  docs/regressions.md is written from here and from the marks by scripts/gen_regressions.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """A public report.

    Attributes:
        references: ``owner/name#number``, or ``owner/name:path`` for what only the code says.
        symptom: what users saw.
        ours: what happens here.
    """

    references: tuple[str, ...]
    symptom: str
    ours: str


TE, HF, LIGHTNING = "NVIDIA/TransformerEngine", "huggingface", "Lightning-AI"

REPORTS: tuple[Report, ...] = (
    Report(
        (f"{TE}#1482",),
        "a tied model cannot be saved after Linears were swapped",
        "the tie stays; save_pretrained writes the original",
    ),
    Report((f"{TE}#199",), "a strict load of a plain checkpoint misses `_extra_state`", "both layouts load strictly"),
    Report(
        (f"{TE}#1317", f"{TE}#1335"), "a BytesIO in the state breaks safetensors", "files hold tensors only; empty state is dropped"
    ),
    Report(
        (f"{HF}/transformers#38154", f"{HF}/transformers#38155"), "`_extra_state` breaks from_pretrained", "there and back is equal"
    ),
    Report(
        (f"{TE}:transformer_engine/pytorch/_extra_state.py",),
        "TE 2.20 refuses a pickled history without a switch in the environment",
        "none is written; one that is given is refused, not dropped",
    ),
    Report(
        ("NVIDIA-NeMo/Automodel#2247", "NVIDIA-NeMo/Megatron-Bridge#6032"),
        "forgiving `_extra_state` also forgave real missing weights",
        "any other key that is missing is an error",
    ),
    Report(
        (f"{HF}/accelerate#3171", f"{LIGHTNING}/pytorch-lightning#21755"),
        "LayerNorm without affine parameters crashes the conversion",
        "left alone: `norm.no-affine`",
    ),
    Report((f"{LIGHTNING}/pytorch-lightning#20804",), "RMSNorm is not converted", "converted, whatever its class is called"),
    Report(
        ("linkedin/Liger-Kernel#74", "axolotl-ai-cloud/axolotl#1886", "linkedin/Liger-Kernel#370"),
        "Gemma's norm multiplies by 1 + w; silently wrong without",
        "a probe tells: `zero_centered_gamma`",
    ),
    Report(
        ("linkedin/Liger-Kernel#764", "linkedin/Liger-Kernel#392"),
        "patches miss layers or attributes",
        "what was planned is what is converted; attributes stay readable",
    ),
    Report(
        (f"{TE}#1422", f"{TE}#1571", f"{TE}#232"), "FP8 rejects the number of rows of an input", "rows are added and cut off again"
    ),
    Report((f"{LIGHTNING}/lit-llama#249",), "decoding in FP8 fails as the sequence grows", "every length decodes"),
    Report(
        ("modelscope/ms-swift#9722", "NVIDIA-NeMo/Speech#8869"),
        "recipes need other multiples than 16",
        "a table of multiples by recipe; sites that do not fit stay in high precision",
    ),
    Report(
        ("hpcaitech/ColossalAI#6390", "hpcaitech/ColossalAI#6393"),
        "a head with two labels breaks FP8",
        "high precision, with the reason",
    ),
    Report((f"{HF}/accelerate#1188",), "a check of sizes ends the whole conversion", "each site is judged alone"),
    Report((f"{TE}#614",), "the meaning of a mask differs between backends", "each kind of mask is compared with the original"),
    Report((f"{HF}/transformers#38094", "pytorch/pytorch#170400"), "a boolean mask inverted", "both polarities are compared"),
    Report(
        ("deepspeedai/DeepSpeed#1466", "deepspeedai/DeepSpeed#2229", "deepspeedai/DeepSpeed#2506"),
        "padded batches give other outputs",
        "a padded batch gives what each row gives alone",
    ),
    Report(
        ("NVIDIA/bionemo-framework:bionemo-recipes/models/llama3/modeling_llama_te.py",),
        "left padding is not supported",
        "such a call runs the model's own attention, and is counted",
    ),
    Report((f"{TE}#413",), "a GPT-2 block differs from te.TransformerLayer", "equal, or converted in parts where GELU is exact"),
    Report((f"{TE}#432",), "keys and values were made from the input before the norm", "one norm feeds q, k and v"),
    Report(
        (f"{HF}/transformers#25199", "onnxruntime/mobius#522"),
        "two layouts of rotary embeddings, partial ones, other bases",
        "the model's own stay, and are compared",
    ),
    Report(
        ("NVIDIA-NeMo/Automodel#3027", f"{TE}#1245"),
        "a fused rotary embedding breaks log-probabilities",
        "not fused; the model's own function runs",
    ),
    Report(
        ("NVIDIA-NeMo/Speech#11951",),
        "a norm of Gemma 2 was mapped to another, and one stayed zero",
        "every tensor is used exactly once",
    ),
    Report(
        ("THUDM/slime#345", "NVIDIA/TensorRT-LLM#1733"),
        "a checkpoint of a tied model has no lm_head",
        "the tie fills it in, in either direction",
    ),
    Report(
        (f"{HF}/transformers#311", f"{HF}/transformers#24504", "AutoGPTQ/AutoGPTQ#139"),
        "GPT-2's Conv1D is ignored, or not transposed",
        "converted with its weight transposed",
    ),
    Report(("pytorch/ao#1871",), "frozen weights become trainable", "flags stay"),
    Report(("pytorch/ao#2241",), "nothing happens to a root nn.Linear", "the result is the new root"),
    Report(("pytorch/pytorch#58969",), "out_proj of MultiheadAttention cannot be swapped", "the attention is replaced as a whole"),
    Report(("ModelTC/MQBench#57",), "weight_norm: the weight is no Parameter", "left alone: `module.parametrized`"),
    Report(
        ("NVIDIA-NeMo/Automodel#1011", f"{HF}/peft#3048", "pytorch/torchtune#2833"),
        "LoRA and TE's Linear do not know each other",
        "LoRA before and after the conversion gives the original's gradients",
    ),
    Report(
        (f"{HF}/accelerate#3554", f"{HF}/accelerate#3870", f"{HF}/accelerate#3154"),
        "optimizers are matched by names that a wrapper or a tie changes",
        "matched by identity; prefixes of wrappers are known when weights are loaded",
    ),
    Report(
        ("mosaicml/llm-foundry#1745", f"{TE}#596"),
        "weights on meta become NaN after TE layers were skipped",
        "an error that says what to do; a plan is possible",
    ),
    Report(
        (f"{TE}#415", f"{TE}#776", f"{TE}#1190", "NVIDIA/Megatron-LM#7538"),
        "activation checkpointing and FP8: errors, or a recomputation in another precision",
        "the original's gradients, both kinds; under a recipe TE's own checkpoint runs",
    ),
    Report(
        (f"{TE}#705", f"{TE}#1241", f"{TE}#2590"),
        "TE modules break the graph of torch.compile",
        "a compiled twin has the original's numbers",
    ),
    Report(
        (f"{TE}#764",), "training in FP8 does not converge after a swap", "steps of an optimizer are compared; gradients by name"
    ),
    Report(
        (
            f"{HF}/accelerate#1647",
            f"{HF}/accelerate#2597",
            f"{TE}#445",
            f"{TE}#1119",
            f"{TE}#972",
            "pytorch/ao#2262",
            "pytorch/ao#1297",
        ),
        "FP8 is slower on small models",
        "measured by benchmarks/gpu.py against the original, eager and compiled",
    ),
    Report((f"{TE}#1429",), "FP8 takes more memory than fp16", "measured by benchmarks/gpu.py beside the original"),
    Report(
        (f"{TE}#1159", f"{HF}/accelerate#1348", f"{TE}#2304"),
        "a recipe that the GPU does not have ends in an assertion",
        "a warning or an error that names the GPU, the recipe and what it has",
    ),
    Report(
        (f"{TE}#1684", f"{TE}#906", f"{TE}#756", f"{TE}#1853", f"{TE}#1541", f"{TE}#1284", f"{HF}/accelerate#1475"),
        "importing TE fails in many ways, and takes the tool with it",
        "imported in a process of its own; the failure is described",
    ),
    Report((f"{TE}#1287",), "importing fails without CUDA", "no CUDA, no GPU and no TE are needed to import and to convert"),
    Report(
        ("NVIDIA/Megatron-LM#1280", f"{HF}/accelerate#1240", f"{LIGHTNING}/lightning-thunder#809"),
        "arguments change their names from one TE to the next",
        "signatures are looked at; recorded ones of TE 2.0 to 2.20 are tested",
    ),
    Report(
        (f"{HF}/transformers#36022", f"{HF}/transformers#31414"),
        "Transformers models cannot be traced symbolically",
        "a concrete run is recorded; what does not run is judged module by module",
    ),
    Report(
        ("microsoft/onnxruntime#10359", "microsoft/onnxruntime#21208", "microsoft/onnxruntime#15225", "pytorch/pytorch#100452"),
        "attention is no longer fused after a release, and nothing says why",
        "recognised by its numbers; a near miss says what is in the way",
    ),
    Report(
        (f"{TE}#1556",), "a model under autocast, in which nothing runs on TE", "the report begins with it: 0 sites would run on TE"
    ),
)
