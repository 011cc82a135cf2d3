// Tables that sort by a click, or Enter, on a column's header.

function sortKey(cell) {
  return cell && "sort" in cell.dataset ? cell.dataset.sort : null;
}

function compareCells(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null); // what is not known comes last, both ways
  const [x, y] = [Number(a), Number(b)];
  if (a !== "" && b !== "" && !Number.isNaN(x) && !Number.isNaN(y)) return sign * (x - y);
  return sign * a.localeCompare(b, "en", { numeric: true });
}

const FOLD_OVER = 15;

// A long table shows its first rows (twelve, by the style) until asked for all.
function foldLong(table) {
  const count = table.tBodies[0].rows.length;
  if (count <= FOLD_OVER) return;
  table.classList.add("folded");
  const button = element("button", "unfold", `Show all ${count} rows`);
  button.type = "button";
  button.setAttribute("aria-controls", table.id);
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => {
    const folded = table.classList.toggle("folded");
    button.textContent = folded ? `Show all ${count} rows` : "Show fewer rows";
    button.setAttribute("aria-expanded", String(!folded));
  });
  table.parentElement.after(button);
}

function makeSortable(table) {
  const headers = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  headers.forEach((header, column) => {
    header.querySelector("button").addEventListener("click", () => {
      const falling = header.getAttribute("aria-sort") === "descending"
        || (!header.hasAttribute("aria-sort") && !header.classList.contains("num"));
      const sign = falling ? 1 : -1;
      const rows = [...body.rows];
      rows.sort((a, b) => compareCells(sortKey(a.cells[column]), sortKey(b.cells[column]), sign));
      for (const other of headers) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", falling ? "ascending" : "descending");
      body.append(...rows);
    });
  });
}
