const value = cell => { const v = cell.dataset.v ?? cell.textContent.trim(); return v === '' ? null : isNaN(v) ? v : Number(v); };
const compare = (a, b) => typeof a === typeof b && typeof a === 'number' ? a - b : String(a).localeCompare(String(b), 'en', {numeric: true});
for (const button of document.querySelectorAll('th button')) button.addEventListener('click', () => {
  const head = button.parentElement, body = head.closest('table').tBodies[0];
  const down = head.getAttribute('aria-sort') === 'ascending';
  for (const other of head.parentElement.children) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const rows = [...body.rows].map(row => [value(row.cells[head.cellIndex]), row]);
  rows.sort(([a], [b]) => a === null ? (b === null ? 0 : 1) : b === null ? -1 : down ? compare(b, a) : compare(a, b));
  body.append(...rows.map(([, row]) => row));
});
const theme = document.getElementById('theme'), root = document.documentElement;
theme.addEventListener('click', () => {
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
});
