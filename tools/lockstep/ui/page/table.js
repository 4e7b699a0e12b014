// The table of settings and results. Settings that differ between the runs are first and highlighted. Browsers need
// seconds for a table with thousands of columns, so it has the first results only; the hint says so.

import {duration, element, number, setState} from "./format.js";

const mostResults = 100;

const fixedColumns = [
  {key: "name", title: "Run", value: (run) => run.name},
  {key: "state", title: "State", value: (run) => run.state},
];
const lastColumns = [
  {key: "step", title: "Steps", value: (run) => run.step},
  {key: "epoch", title: "Epochs", value: (run) => run.epoch},
  {key: "seconds", title: "Duration", value: (run) => run.seconds, text: duration},
  {key: "samples_per_second", title: "Samples/s", value: (run) => run.summary?.samples_per_second ?? null},
];

function resultsOf(run) {
  return {...run.last, ...(typeof run.summary?.metrics === "object" ? run.summary.metrics : {})};
}

function namesIn(runs, objectOf) {
  const names = new Set();
  for (const run of runs) for (const name of Object.keys(objectOf(run) ?? {})) names.add(name);
  return [...names];
}

function differs(runs, value) {
  return runs.length > 1 && new Set(runs.map((run) => JSON.stringify(value(run) ?? null))).size > 1;
}

// {columns, results}: the number of all results.
function columnsOf(runs) {
  const settings = namesIn(runs, (run) => run.settings).map((name) => {
    const value = (run) => run.settings?.[name];
    return {key: `setting ${name}`, title: name, value, isSetting: true, differs: differs(runs, value)};
  });
  settings.sort((a, b) => Number(b.differs) - Number(a.differs));
  const values = new Map(runs.map((run) => [run, resultsOf(run)]));
  const names = namesIn(runs, (run) => values.get(run));
  const results = names.slice(0, mostResults).map((name) => ({
    key: `result ${name}`,
    title: name,
    value: (run) => values.get(run)?.[name],
  }));
  const differing = settings.filter((column) => column.differs);
  const equal = settings.filter((column) => !column.differs);
  return {columns: [...fixedColumns, ...differing, ...results, ...lastColumns, ...equal], results: names.length};
}

function isNumber(value) {
  return typeof value === "number" || value === null || value === undefined;
}

function compared(a, b) {
  const isMissing = (value) => value === null || value === undefined;
  if (isMissing(a) || isMissing(b)) return Number(isMissing(a)) - Number(isMissing(b));
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, {numeric: true});
}

export class SettingsTable {
  constructor(table, hint) {
    this.table = table;
    this.hint = hint;
    this.sort = {key: null, isDescending: false};
    this.shown = "";
  }

  show(runs) {
    this.runs = runs;
    const shown = JSON.stringify([
      this.sort,
      runs.map((run) => [run.id, run.name, run.state, run.settings, run.summary, run.last, run.step]),
    ]);
    if (shown === this.shown) return;
    this.shown = shown;
    const {columns, results} = columnsOf(runs);
    const differing = columns.filter((column) => column.differs).length;
    const settings = columns.filter((column) => column.isSetting).length;
    const left = results > mostResults ? ` ${mostResults} of ${results} results are shown.` : "";
    const text =
      runs.length === 0
        ? "Select runs to compare them."
        : settings === 0
          ? "These runs have no settings.json."
          : runs.length === 1
            ? ""
            : `${differing} of ${settings} settings differ (★).`;
    this.hint.textContent = `${text}${left}`.trim();
    this.showHead(columns);
    this.showRows(columns);
  }

  showHead(columns) {
    const focused = document.activeElement?.dataset?.column;
    const row = element("tr");
    for (const column of columns) {
      const isSorted = this.sort.key === column.key;
      const button = element(
        "button",
        {type: "button", "data-column": column.key},
        `${column.differs ? "★ " : ""}${column.title}${isSorted ? (this.sort.isDescending ? " ▼" : " ▲") : ""}`,
      );
      button.addEventListener("click", () => this.sortBy(column.key));
      row.append(
        element(
          "th",
          {
            scope: "col",
            class: `${this.isOfNumbers(column) ? "number" : ""}${column.differs ? " differs" : ""}`,
            "aria-sort": isSorted ? (this.sort.isDescending ? "descending" : "ascending") : "none",
          },
          button,
        ),
      );
    }
    this.table.tHead.replaceChildren(row);
    if (focused) this.table.tHead.querySelector(`[data-column="${CSS.escape(focused)}"]`)?.focus();
  }

  showRows(columns) {
    const sorted = columns.find((column) => column.key === this.sort.key);
    const runs = [...this.runs];
    if (sorted) runs.sort((a, b) => compared(sorted.value(a), sorted.value(b)) * (this.sort.isDescending ? -1 : 1));
    this.table.tBodies[0].replaceChildren(
      ...runs.map((run) => element("tr", {}, ...columns.map((column) => this.cell(column, run)))),
    );
  }

  isOfNumbers(column) {
    return !["name", "state"].includes(column.key) && this.runs.every((run) => isNumber(column.value(run)));
  }

  cell(column, run) {
    const value = column.value(run);
    if (column.key === "name") return element("th", {scope: "row", title: run.path}, run.name);
    if (column.key === "state") {
      const mark = element("span");
      setState(mark, run.state);
      return element("td", {}, mark);
    }
    const text = isNumber(value) ? (column.text ?? number)(value) : String(value);
    return element("td", {class: `${isNumber(value) ? "number" : ""}${column.differs ? " differs" : ""}`}, text);
  }

  sortBy(key) {
    this.sort = {key, isDescending: this.sort.key === key && !this.sort.isDescending};
    this.show(this.runs);
  }
}
