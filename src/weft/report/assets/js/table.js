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
