// The dashboard. The server describes all runs once a second, with a tag that changes if anything has changed. The page
// then asks for what is visible and stale: curves of charts on the screen, ranks and checkpoints of the run in focus.

import {Chart, drawTimes} from "./chart.js";
import {colourOf, darkMode, dashOf, Slots} from "./colours.js";
import {bytes, clockTime, element, setState, setText} from "./format.js";
import {RanksPanel} from "./ranks.js";
import {SettingsTable} from "./table.js";

const pollInterval = 1000;
const mostSelectedAtFirst = 8;
const mostRequests = 4;
const mostPointsOfChart = 12000; // of all curves together

const byId = (id) => document.getElementById(id);

const view = {x: "step", logX: false, logY: false, zoom: null, smoothing: 0.6};
const selected = new Set(); // ids of runs
const slots = new Slots();
const charts = new Map(); // by metric
const visibleCharts = new Set(); // on the screen or close to it
let runs = new Map(); // by id, the newest first
let hasSkippedLinks = false; // by the search for runs
let focus = null; // id of the run whose ranks and checkpoints are shown
let isFirstAnswer = true;

// --- the server

const tags = new Map();
let failures = 0;

// The answer of the server; undefined if it is the same as the last time and `isConditional`.
async function ask(path, isConditional = false) {
  const headers = isConditional && tags.has(path) ? {"If-None-Match": tags.get(path)} : {};
  const response = await fetch(path, {headers, cache: "no-store"});
  if (response.status === 304) return undefined;
  if (!response.ok)
    throw new Error(
      response.status === 401
        ? "The token is not valid any more: open the URL that lockstep ui has printed."
        : `The server answered ${response.status}.`,
    );
  if (isConditional) tags.set(path, response.headers.get("ETag"));
  return response.json();
}

function announce(text) {
  byId("announcer").textContent = text;
}

// --- what is remembered in this tab

function remember() {
  const paths = [...selected].map((id) => runs.get(id)?.path);
  sessionStorage.setItem(
    "lockstep",
    JSON.stringify({...view, zoom: null, selected: paths, focus: runs.get(focus)?.path ?? null}),
  );
}

function remembered() {
  try {
    return JSON.parse(sessionStorage.getItem("lockstep")) ?? {};
  } catch {
    return {};
  }
}

// --- runs

const runItems = new Map();

class RunItem {
  constructor(id) {
    this.box = element("input", {type: "checkbox", id: `run-${id}`});
    this.box.addEventListener("change", () => select([id], this.box.checked));
    this.swatch = element("span", {class: "swatch", "aria-hidden": "true"});
    this.label = element("label", {for: `run-${id}`, class: "unseen"});
    this.name = element("button", {type: "button", class: "run-name"});
    this.name.addEventListener("click", () => setFocus(id));
    this.state = element("span");
    this.problem = element("span", {class: "problem", hidden: true});
    this.item = element(
      "li",
      {},
      element("span", {class: "run-check"}, this.box, this.label, this.swatch),
      element("div", {class: "run-text"}, this.name, this.state, this.problem),
    );
  }

  show(run) {
    this.box.checked = selected.has(run.id);
    setText(this.label, `Show the curves of ${run.name}`);
    setText(this.name, run.name);
    this.name.title = `${run.path}\nlast change: ${clockTime(run.changed)}`;
    this.name.setAttribute("aria-pressed", String(run.id === focus));
    this.item.classList.toggle("focus", run.id === focus);
    setState(this.state, run.state);
    this.problem.hidden = run.problems.length === 0;
    setText(this.problem, run.problems.length > 0 ? `⚠ ${run.problems[0]}` : "");
    this.problem.title = run.problems.join("\n");
    this.showSwatch(slots.of(run.id));
  }

  showSwatch(slot) {
    const key = slot < 0 ? "" : `${colourOf(slot)} ${dashOf(slot)}`;
    if (this.swatchKey === key) return;
    this.swatchKey = key;
    this.swatch.replaceChildren();
    if (slot < 0) return;
    const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    picture.setAttribute("viewBox", "0 0 26 10");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const attributes = {
      x1: 1,
      y1: 5,
      x2: 25,
      y2: 5,
      stroke: colourOf(slot),
      "stroke-width": 3,
      "stroke-dasharray": dashOf(slot).join(" "),
    };
    for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
    picture.append(line);
    this.swatch.append(picture);
  }
}

function isFound(run) {
  const words = byId("search")
    .value.toLowerCase()
    .split(/\s+/)
    .filter((word) => word);
  const text = `${run.name} ${run.state} ${JSON.stringify(run.settings ?? {})}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

// Runs that train are first. Their files change all the time, so among them the one that was found last is the newest.
function newestFirst(a, b) {
  const trains = (run) => Number(run.is_live || run.state === "running");
  return trains(b) - trains(a) || (trains(a) ? 0 : b.changed - a.changed) || b.id - a.id;
}

let shownOrder = "";

// Puts the items into the order of the runs. An element that is moved loses the focus.
function orderRunItems() {
  const ids = [...runs.keys()];
  if (shownOrder === ids.join()) return;
  shownOrder = ids.join();
  const focused = document.activeElement;
  const list = byId("runs");
  list.append(...ids.map((id) => runItems.get(id).item));
  if (list.contains(focused)) focused.focus({preventScroll: true});
}

function showRuns() {
  let count = 0;
  for (const run of runs.values()) if (!runItems.has(run.id)) runItems.set(run.id, new RunItem(run.id));
  orderRunItems();
  for (const run of runs.values()) {
    const item = runItems.get(run.id);
    item.item.hidden = !isFound(run);
    if (!item.item.hidden) count += 1;
    item.show(run);
  }
  setText(byId("run-count"), `${selected.size} of ${runs.size} selected${count < runs.size ? `, ${count} found` : ""}`);
}

function select(ids, isSelected) {
  for (const id of ids) isSelected ? selected.add(id) : selected.delete(id);
  slots.assign(selected);
  if (isSelected && ids.length === 1 && focus === null) focus = ids[0];
  remember();
  showAll();
}

function setFocus(id) {
  focus = id;
  ranksPanel.clear();
  tags.delete(`/api/ranks?run=${id}`);
  tags.delete(`/api/checkpoints?run=${id}`);
  if (!selected.has(id)) selected.add(id);
  slots.assign(selected);
  remember();
  showAll();
  updateFocus();
}

// At first the newest runs are selected, and the one that is training is in focus.
function chooseAtFirst() {
  const before = remembered();
  const newest = [...runs.values()];
  const known = newest.filter((run) => before.selected?.includes(run.path));
  for (const run of known.length > 0 ? known : newest.slice(0, mostSelectedAtFirst)) selected.add(run.id);
  focus =
    (newest.find((run) => run.path === before.focus) ?? newest.find((run) => run.is_live) ?? newest[0])?.id ?? null;
  const inOrder = [...runs.keys()].filter((id) => selected.has(id));
  slots.assign(new Set(inOrder));
}

// --- curves

const visibility = new IntersectionObserver(
  (entries) => {
    for (const {target, isIntersecting} of entries) {
      const chart = charts.get(target.dataset.metric);
      if (!chart) continue;
      chart.setVisible(isIntersecting);
      if (isIntersecting) visibleCharts.add(chart);
      else visibleCharts.delete(chart);
    }
    markStale();
  },
  {rootMargin: "200px"},
);

let resizeTimer = 0;
const resizes = new ResizeObserver(() => {
  clearTimeout(resizeTimer);
  resizeTimer = setTimeout(() => markStale(), 80);
});

const actions = {
  zoom(from, to) {
    view.zoom = {from, to};
    byId("reset-zoom").disabled = false;
    announce(`Zoomed to ${view.x} ${Number(from.toPrecision(4))} to ${Number(to.toPrecision(4))}`);
    markStale();
  },
  reset() {
    if (!view.zoom) return;
    view.zoom = null;
    byId("reset-zoom").disabled = true;
    announce("The whole curves are shown");
    markStale();
  },
  hover(position, pointedAt) {
    requestAnimationFrame(() => {
      for (const chart of visibleCharts) chart.showCrosshair(position, chart === pointedAt);
    });
  },
  announce,
};

function shownMetrics() {
  const names = new Set();
  for (const id of selected) for (const name of runs.get(id)?.metrics ?? []) names.add(name);
  const wanted = byId("metric-filter").value.toLowerCase();
  return new Set([...names].filter((name) => name.toLowerCase().includes(wanted)));
}

function showCharts() {
  const names = shownMetrics();
  const container = byId("charts");
  for (const [name, chart] of charts)
    if (!names.has(name)) {
      visibility.unobserve(chart.figure);
      visibleCharts.delete(chart);
      chart.setVisible(false);
      chart.figure.remove();
      charts.delete(name);
    }
  const added = [...names].filter((name) => !charts.has(name)).map((name) => new Chart(name, view, actions));
  container.append(...added.map((chart) => chart.figure));
  for (const chart of added) {
    charts.set(chart.metric, chart);
    visibility.observe(chart.figure);
  }
  const hint = byId("no-curves");
  hint.hidden = names.size > 0;
  setText(
    hint,
    runs.size === 0
      ? noRunsText()
      : selected.size === 0
        ? "Select runs on the left to see their curves."
        : "The selected runs have no such metrics yet.",
  );
}

function noRunsText() {
  const text = "There are no runs in the folders yet. New runs appear here by themselves";
  const hint = "; symbolic links below the folders are not followed: name their targets on the command line";
  return `${text}${hasSkippedLinks ? hint : ""}.`;
}

// The key of all that the curves of a chart depend on.
function versionOf(chart) {
  const versions = [...selected].map((id) => `${id}:${runs.get(id)?.version}`);
  return JSON.stringify([versions, view.x, view.logX, view.zoom, view.smoothing, chart.width]);
}

// The part of the horizontal axis that all charts show.
function domain() {
  if (view.zoom) return view.zoom;
  const key = {step: "step", epoch: "epoch", time: "seconds"}[view.x];
  return {from: 0, to: Math.max(0, ...[...selected].map((id) => runs.get(id)?.[key] ?? 0))};
}

function curvesPath(chart) {
  const points = Math.max(100, Math.min(chart.width - 60, Math.floor(mostPointsOfChart / Math.max(1, selected.size))));
  const query = new URLSearchParams({metric: chart.metric, runs: [...selected].join(","), x: view.x, points});
  if (view.smoothing > 0) query.set("smooth", view.smoothing);
  if (view.logX) query.set("logx", "1");
  if (view.zoom) {
    query.set("from", view.zoom.from);
    query.set("to", view.zoom.to);
  }
  return `/api/curves?${query}`;
}

let requests = 0; // for curves, that are not answered yet

async function refreshChart(chart) {
  chart.isBusy = true;
  requests += 1;
  const version = versionOf(chart);
  try {
    const answer = await ask(curvesPath(chart));
    chart.version = version;
    chart.isStale = version !== versionOf(chart);
    const lines = answer.curves
      .filter(({run}) => selected.has(run))
      .map((curve) => ({...curve, name: runs.get(curve.run)?.name ?? "", slot: slots.of(curve.run)}));
    lines.sort((a, b) => a.slot - b.slot);
    chart.setLines(lines, domain());
    chart.figure.dataset.drawn = String(Number(chart.figure.dataset.drawn ?? 0) + 1);
  } catch (error) {
    chart.isStale = false; // the next poll tries again
    setText(chart.note, error.message);
  }
  chart.isBusy = false;
  requests -= 1;
  refreshCharts();
}

function refreshCharts() {
  for (const chart of visibleCharts) {
    if (requests >= mostRequests) return;
    if (!chart.isStale || chart.isBusy || chart.width === 0) continue;
    refreshChart(chart);
  }
}

// Charts that are not on the screen are looked at when they appear.
function markStale() {
  for (const chart of visibleCharts) if (chart.version !== versionOf(chart)) chart.isStale = true;
  refreshCharts();
}

// --- ranks and checkpoints of the run in focus

const ranksPanel = new RanksPanel(
  async (rank) => {
    const {lines, problem} = await ask(`/api/output?run=${focus}&rank=${rank}&lines=200`);
    return problem ? [`The output cannot be shown: ${problem}`] : lines;
  },
  announce,
);

async function updateFocus() {
  const run = runs.get(focus);
  if (!run) return;
  const id = focus;
  const job = await ask(`/api/ranks?run=${id}`, true);
  if (focus !== id) return;
  if (job !== undefined) {
    if (job && job.ranks.length > 0) ranksPanel.show(run, job);
    else ranksPanel.clear();
  }
  const checkpoints = await ask(`/api/checkpoints?run=${id}`, true);
  if (checkpoints !== undefined && focus === id) showCheckpoints(run, checkpoints);
}

function showCheckpoints(run, {folder, files}) {
  byId("checkpoints-section").hidden = files.length === 0;
  setText(byId("checkpoints-title"), `Checkpoints of ${run.name}`);
  setText(byId("checkpoints-folder"), folder);
  byId("checkpoints").tBodies[0].replaceChildren(
    ...files.map((file) =>
      element(
        "tr",
        {},
        element(
          "th",
          {scope: "row"},
          file.name,
          file.is_best ? element("span", {class: "badge"}, `★ best${file.best_of ? `: ${file.best_of}` : ""}`) : "",
        ),
        element("td", {class: "number"}, bytes(file.bytes)),
        element("td", {}, clockTime(file.saved)),
      ),
    ),
  );
}

// --- all of it

const table = new SettingsTable(byId("table"), byId("table-hint"));

function showAll() {
  showRuns();
  showCharts();
  table.show([...runs.values()].filter((run) => selected.has(run.id)));
  markStale();
}

function showStatus(isReading) {
  const live = [...runs.values()].filter((run) => run.state === "running").length;
  const failed = [...runs.values()].filter((run) => run.state === "failed").length;
  const texts = [`${runs.size} ${runs.size === 1 ? "run" : "runs"}`];
  if (live > 0) texts.push(`${live} running`);
  if (failed > 0) texts.push(`${failed} failed`);
  if (isReading) texts.push("reading records");
  setText(byId("status"), texts.join(" · "));
  byId("status").classList.remove("alert");
}

async function poll() {
  try {
    const answer = await ask("/api/runs", true);
    if (answer) {
      runs = new Map(answer.runs.sort(newestFirst).map((run) => [run.id, run]));
      hasSkippedLinks = answer.has_skipped_links;
      if (isFirstAnswer && runs.size > 0) {
        isFirstAnswer = false;
        chooseAtFirst();
      }
      showAll();
      showStatus(answer.reading);
    } else if (failures > 0) {
      showStatus(false);
    }
    await updateFocus();
    failures = 0;
  } catch (error) {
    failures += 1;
    setText(byId("status"), error instanceof TypeError ? "No connection to lockstep ui; trying again." : error.message);
    byId("status").classList.add("alert");
  }
  setTimeout(poll, document.hidden ? 5 * pollInterval : pollInterval);
}

function connectControls() {
  const before = remembered();
  for (const key of ["x", "logX", "logY", "smoothing"]) if (before[key] !== undefined) view[key] = before[key];
  for (const radio of document.querySelectorAll("input[name=x]")) {
    radio.checked = radio.value === view.x;
    radio.addEventListener("change", () => {
      view.x = radio.value;
      view.zoom = null;
      byId("reset-zoom").disabled = true;
      remember();
      markStale();
    });
  }
  const slider = byId("smoothing");
  const showSmoothing = () => setText(byId("smoothing-value"), view.smoothing.toFixed(2));
  slider.value = view.smoothing;
  showSmoothing();
  slider.addEventListener("input", () => {
    view.smoothing = Number(slider.value);
    showSmoothing();
    remember();
    markStale();
  });
  byId("log-y").checked = view.logY;
  byId("log-y").addEventListener("change", () => {
    view.logY = byId("log-y").checked;
    remember();
    for (const chart of visibleCharts) chart.draw();
  });
  byId("log-x").checked = view.logX;
  byId("log-x").addEventListener("change", () => {
    view.logX = byId("log-x").checked;
    remember();
    markStale();
  });
  byId("reset-zoom").addEventListener("click", () => actions.reset());
  byId("search").addEventListener("input", showRuns);
  byId("metric-filter").addEventListener("input", () => {
    showCharts();
    markStale();
  });
  byId("select-all").addEventListener("click", () =>
    select(
      [...runs.values()].filter(isFound).map((run) => run.id),
      true,
    ),
  );
  byId("select-none").addEventListener("click", () =>
    select(
      [...runs.values()].filter(isFound).map((run) => run.id),
      false,
    ),
  );
  darkMode.addEventListener("change", () => {
    showRuns();
    for (const chart of visibleCharts) chart.draw();
  });
}

if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname);
if (matchMedia("(max-width: 720px)").matches) byId("runs-panel").open = false;
connectControls();
resizes.observe(byId("charts"));
poll();

// For tests: what is drawn, and how fast.
window.lockstep = {view, charts, drawTimes, selected};
