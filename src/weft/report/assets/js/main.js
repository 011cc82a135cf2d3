// Start: theme, tables, copy buttons, timelines.

const timelines = [];
const maps = [];
const darkPreferred = window.matchMedia("(prefers-color-scheme: dark)");

function themeNow() {
  return document.documentElement.dataset.theme || (darkPreferred.matches ? "dark" : "light");
}

function showTheme() {
  const button = document.getElementById("theme");
  const dark = themeNow() === "dark";
  button.textContent = dark ? "Light" : "Dark";
  button.setAttribute("aria-pressed", String(dark));
  button.setAttribute("aria-label", dark ? "Use light colours" : "Use dark colours");
  for (const timeline of timelines) timeline.recolour();
  for (const map of maps) map.draw();
}

function setUpTheme() {
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = themeNow() === "dark" ? "light" : "dark";
    showTheme();
  });
  darkPreferred.addEventListener("change", showTheme);
  // Paper is white: a canvas does not follow a print style by itself.
  let before;
  window.addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    document.documentElement.classList.add("printing");
    showTheme();
  });
  window.addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    if (before) document.documentElement.dataset.theme = before;
    else delete document.documentElement.dataset.theme;
    showTheme();
  });
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, as in a file opened from disk in some browsers
    const area = element("textarea", "sr");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function setUpCopy(button) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    await copyText(button.parentElement.querySelector("code").textContent);
    button.textContent = "Copied";
    button.focus();
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

function setUpTimeline(root) {
  const timeline = new Timeline(root);
  listenToWheel(timeline);
  listenToPointer(timeline);
  listenToOverview(timeline);
  listenToKeys(timeline);
  listenToLinks(timeline);
  listenToSearch(timeline);
  timeline.openAtFirst();
  new ResizeObserver(() => timeline.schedule()).observe(timeline.stage);
  timelines.push(timeline);
}

document.querySelectorAll(".timeline").forEach(setUpTimeline);
for (const root of document.querySelectorAll(".ranks")) maps.push(new RankMap(root));
document.querySelectorAll("table.sortable").forEach(makeSortable);
document.querySelectorAll("table.sortable, table.heat").forEach(foldLong);
document.querySelectorAll(".copy").forEach(setUpCopy);
setUpTheme();
showTheme();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
