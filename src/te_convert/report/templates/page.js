"use strict";
// Nothing here is needed to read the page: it filters the table of sites, and unfolds everything for the printer.
const box = document.getElementById("filter");
if (box) {
  const rows = [...document.querySelectorAll("#site-rows tbody tr")].map((row) => [row, row.textContent.toLowerCase()]);
  const found = document.getElementById("found");
  box.closest(".filter").hidden = false;
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/);
    let count = 0;
    for (const [row, text] of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      count += !row.hidden;
    }
    found.textContent = `${count} of ${rows.length} rows`;
  });
}
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const fold of opened) fold.open = true;
});
addEventListener("afterprint", () => {
  for (const fold of opened) fold.open = false;
});
