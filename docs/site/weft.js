// Material adds wrappers for tables and buttons for code after loading. What scrolls must be reachable by keyboard,
// and what assistive technology lists must have a name.
function improve() {
  for (const scrolled of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (scrolled.tabIndex < 0) scrolled.tabIndex = 0;
  }
  document.querySelectorAll("nav.md-code__nav").forEach((buttons, place) => {
    buttons.ariaLabel ??= `Code block ${place + 1}`;
  });
  for (const search of document.querySelectorAll(".md-search")) search.ariaLabel ??= "Search";
}
new MutationObserver(improve).observe(document.body, { childList: true, subtree: true });
improve();
