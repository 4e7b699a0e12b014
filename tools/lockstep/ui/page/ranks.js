// The ranks of a job: a row for each, and the details of the selected one.

import {bytes, duration, element, number, percent, setState, setText} from "./format.js";

const parts = ["forward", "backward", "communication", "data", "other"];

function gpuText(gpu) {
  return `${percent(gpu.utilization)}, ${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`;
}

function timeText(time) {
  return (
    parts
      .filter((part) => time?.[part] !== null && time?.[part] !== undefined)
      .map((part) => `${part} ${percent(time[part])}`)
      .join(", ") || "time unknown"
  );
}

class Row {
  constructor(rank, choose) {
    this.button = element(
      "button",
      {type: "button", "aria-expanded": "false", "aria-controls": "rank-details"},
      String(rank),
    );
    this.button.addEventListener("click", () => choose(rank));
    this.state = element("span");
    this.straggler = element("span", {class: "straggler", hidden: true}, "⚑ straggler");
    this.note = element("span", {class: "note"});
    this.step = element("td", {class: "number"});
    this.rate = element("td", {class: "number"});
    this.segments = parts.map((part) => element("span", {class: part}));
    this.bar = element("div", {class: "bar", role: "img"}, ...this.segments);
    this.memory = element("td", {class: "number"});
    this.gpu = element("td");
    this.host = element("td");
    this.row = element(
      "tr",
      {"data-rank": String(rank)},
      element("th", {scope: "row"}, this.button),
      element("td", {class: "state-cell"}, this.state, this.straggler, this.note),
      this.step,
      this.rate,
      element("td", {}, this.bar),
      this.memory,
      this.gpu,
      this.host,
    );
  }

  show(rank, isChosen) {
    this.button.setAttribute("aria-expanded", String(isChosen));
    this.row.className = `${rank.state}${rank.is_straggler ? " late" : ""}${isChosen ? " chosen" : ""}`;
    setState(this.state, rank.state);
    this.straggler.hidden = !rank.is_straggler;
    setText(this.note, (rank.note ?? "").replace(/^no news /, "")); // the state says so already
    this.note.title = rank.note ?? "";
    setText(this.step, rank.has_file ? String(rank.step) : "–");
    setText(this.rate, number(rank.samples_per_second === null ? null : Math.round(rank.samples_per_second * 10) / 10));
    parts.forEach((part, i) => {
      const width = `${((rank.time?.[part] ?? 0) * 100).toFixed(1)}%`;
      if (this.segments[i].style.width !== width) this.segments[i].style.width = width;
    });
    const text = timeText(rank.time);
    if (this.bar.title !== text) {
      this.bar.title = text;
      this.bar.setAttribute("aria-label", text);
    }
    setText(this.memory, bytes(rank.resident_bytes));
    setText(this.gpu, rank.gpu ? gpuText(rank.gpu) : "–");
    this.gpu.title = rank.gpu?.name ?? "";
    setText(this.host, `${rank.host || "–"}${rank.device ? `, ${rank.device}` : ""}`);
  }
}

export class RanksPanel {
  // `fetchOutput(rank)` returns the last lines of a rank.
  constructor(fetchOutput, announce) {
    this.section = document.getElementById("ranks-section");
    this.body = document.querySelector("#ranks tbody");
    this.details = document.getElementById("rank-details");
    this.fetchOutput = fetchOutput;
    this.announce = announce;
    this.rows = new Map();
    this.chosen = null;
    this.states = new Map();
  }

  clear() {
    this.section.hidden = true;
    this.rows.clear();
    this.states.clear();
    this.body.replaceChildren();
    this.close();
  }

  show(run, job) {
    this.section.hidden = false;
    this.job = job;
    setText(document.getElementById("ranks-title"), `Ranks of ${run.name}`);
    this.showJob(job);
    const known = new Set();
    for (const rank of job.ranks) {
      known.add(rank.rank);
      if (!this.rows.has(rank.rank)) {
        const row = new Row(rank.rank, (number) => this.choose(number));
        this.rows.set(rank.rank, row);
        this.body.append(row.row);
      }
      this.rows.get(rank.rank).show(rank, this.chosen === rank.rank);
      if (rank.state === "failed" && this.states.has(rank.rank) && this.states.get(rank.rank) !== "failed")
        this.announce(`Rank ${rank.rank} has failed: ${rank.note}`);
      this.states.set(rank.rank, rank.state);
    }
    for (const [number, row] of this.rows)
      if (!known.has(number)) {
        row.row.remove();
        this.rows.delete(number);
      }
    if (this.chosen !== null) this.showDetails();
  }

  showJob(job) {
    const texts = [];
    texts.push(`${job.world_size} ${job.world_size === 1 ? "rank" : "ranks"}`);
    if (job.attempt > 0) texts.push(`restart ${job.attempt}`);
    texts.push(`step ${job.step}`);
    if (job.epochs > 0) texts.push(`epoch ${number(job.epoch)} of ${job.epochs}`);
    if (job.batches > 0) texts.push(`batch ${job.batch} of ${job.batches}`);
    if (job.samples_per_second !== null) texts.push(`${number(Math.round(job.samples_per_second))} samples/s`);
    texts.push(duration(job.elapsed));
    setText(document.getElementById("job-line"), texts.join(" · "));
    const report = document.getElementById("job-report");
    const words = [job.report, ...job.problems].filter((text) => text).join("\n");
    report.hidden = words === "";
    setText(report, words);
  }

  choose(number) {
    if (this.chosen === number) return this.close();
    this.rows.get(this.chosen)?.button.setAttribute("aria-expanded", "false");
    this.chosen = number;
    this.details.replaceChildren();
    this.rows.get(number).button.setAttribute("aria-expanded", "true");
    this.showDetails().then(() => {
      this.details.scrollIntoView({block: "nearest"});
      this.announce(`Details of rank ${number} are below the table`);
    });
  }

  close() {
    const row = this.rows.get(this.chosen);
    this.chosen = null;
    this.details.hidden = true;
    this.details.replaceChildren();
    if (row) {
      row.button.setAttribute("aria-expanded", "false");
      row.row.classList.remove("chosen");
      row.button.focus();
    }
  }

  async showDetails() {
    const number = this.chosen;
    const rank = this.job.ranks.find((one) => one.rank === number);
    if (!rank) return;
    const lines = await this.fetchOutput(number);
    if (this.chosen !== number) return;
    const key = JSON.stringify([number, rank.state, rank.note, rank.failure, lines]);
    if (key === this.detailsKey && !this.details.hidden && this.details.childElementCount > 0) return;
    this.detailsKey = key;
    const hadFocus = this.details.contains(document.activeElement) && document.activeElement.tagName === "BUTTON";
    const close = element("button", {type: "button"}, "Close");
    close.addEventListener("click", () => this.close());
    const output = element(
      "pre",
      {tabindex: "0", "aria-label": `Last output of rank ${number}`},
      lines.join("\n") || "no output",
    );
    this.details.hidden = false;
    this.details.replaceChildren(
      element("div", {class: "section-head"}, element("h3", {id: "rank-details-title"}, `Rank ${number}`), close),
      element(
        "p",
        {class: "hint"},
        [`pid ${rank.pid} on ${rank.host || "an unknown host"}`, rank.failure ? "" : rank.note, timeText(rank.time)]
          .filter((text) => text)
          .join(" · "),
      ),
      ...failureParts(rank),
      ...callParts(rank),
      element("h4", {}, "Last output"),
      output,
    );
    output.scrollTop = output.scrollHeight;
    if (hadFocus) close.focus();
  }
}

function callParts(rank) {
  if (!rank.call) return [];
  const {operation, group, number: count, seconds, where} = rank.call;
  return [
    element(
      "p",
      {},
      `Blocked in ${operation} (call ${count} of group ${group}) for ${duration(seconds)}`,
      where ? `, at ${where}.` : ".",
    ),
  ];
}

function failureParts(rank) {
  if (!rank.failure) return [];
  const {kind, message, flight_recorder: file, calls} = rank.failure;
  const made = [element("p", {class: "alert"}, element("strong", {}, kind || "Failure"), `: ${message}`)];
  if (calls.length > 0) {
    const rows = calls.map((call) =>
      element(
        "tr",
        {},
        element("td", {}, call.what),
        element("td", {}, call.state),
        element("td", {}, call.group),
        element("td", {}, call.site),
        element(
          "td",
          {class: "number"},
          call.started_seconds_ago === null ? "–" : `${number(call.started_seconds_ago)} s earlier`,
        ),
        element("td", {class: "number"}, call.took_seconds === null ? "–" : `${number(call.took_seconds)} s`),
      ),
    );
    const head = ["Call", "State", "Group", "Place", "Began", "Took"];
    made.push(
      element("h4", {}, "Last calls, from the flight recorder"),
      element(
        "div",
        {class: "scroll", tabindex: "0", role: "region", "aria-label": "Last calls"},
        element(
          "table",
          {class: "calls"},
          element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {scope: "col"}, text)))),
          element("tbody", {}, ...rows),
        ),
      ),
    );
  }
  if (file) made.push(element("p", {class: "hint"}, `Flight recorder: ${file}`));
  return made;
}
