"use strict";
// Controls, table, captions. Content from files is inserted as text.

const doc = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const uniq = (values) => [...new Set(values)];

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  Object.assign(made, attributes);
  return made;
}

function fill(id, options, wanted) {
  $(id).replaceChildren(...options.map(([value, text]) => element("option", text, { value })));
  if (wanted !== undefined) $(id).value = wanted;
}

function start() {
  const latencies = uniq(Object.keys(doc.metrics).filter((m) => m.endsWith("_ms")).map((m) => m.split("_")[1]));
  for (const { name, colour } of doc.archs) {
    const label = element("label");
    const swatch = element("span", undefined, { className: "swatch" });
    swatch.style.background = colour;
    label.append(element("input", undefined, { type: "checkbox", name: "arch", value: name, checked: true }), swatch, name);
    $("archs").append(label);
  }
  fill("setting", doc.settings.map((s, i) => [i, s]), 0);
  $("setting-label").hidden = doc.settings.length < 2;
  fillLoads();
  fill("rate", Object.entries(doc.metrics).filter(([m]) => !/^[^_]+_[^_]+_ms$/.test(m)).map(([m, n]) => [m, n.title]));
  fill("latency", latencies.map((m) => [m, m.toUpperCase()]));
  fillMarks();
  fill("against", doc.archs.map((a) => [a.name, a.name]));
  fill("watched", doc.archs.map((a) => [a.name, a.name]));
  const watched = doc.entries.find((e) => e.series);
  if (watched) $("watched").value = watched.arch;
  $("lead").textContent = lead();
  $("incomplete").textContent = `Not complete. ${doc.incomplete.join("; ")}.`;
  $("incomplete").hidden = !doc.incomplete.length;
  $("unrecorded").hidden = doc.histograms.length > 0;
  provenance();
  $("controls").addEventListener("change", (event) => {
    if (event.target.id === "setting") fillLoads();
    if (event.target.id === "latency") fillMarks();
    show();
  });
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("watched").addEventListener("change", show);
  window.matchMedia("(max-width: 600px)").addEventListener("change", show);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

// Loads of the setting; initially the highest at which no queue grew.
function fillLoads() {
  const mine = doc.entries.filter((e) => String(e.setting) === ($("setting").value || "0"));
  const here = doc.loads.filter((l) => mine.some((e) => sameLoad(e.load, [l.kind, l.text])));
  const calm = here.filter((l) => mine.some((e) => sameLoad(e.load, [l.kind, l.text]) && !e.grew));
  const before = $("load").value;
  fill("load", here.map((l) => [JSON.stringify([l.kind, l.text]), `${l.name} ${l.text}`]));
  const first = calm[calm.length - 1] || here[here.length - 1];
  $("load").value = before || JSON.stringify([first.kind, first.text]);
  if (!$("load").value) $("load").selectedIndex = 0;
}

function fillMarks() {
  const before = $("mark").value || "p99";
  const marks = Object.entries(doc.marks).filter(([m]) => doc.metrics[`${m}_${$("latency").value}_ms`]);
  fill("mark", marks, before);
  if (!$("mark").value) $("mark").selectedIndex = 0;
}

function chosenNow() {
  return {
    archs: [...document.querySelectorAll("input[name=arch]:checked")].map((box) => box.value),
    setting: Number($("setting").value), load: JSON.parse($("load").value), rate: $("rate").value, latency: $("latency").value,
    mark: $("mark").value, against: $("against").value, watched: $("watched").value,
  };
}

function show() {
  const chosen = chosenNow();
  const time = `${chosen.mark}_${chosen.latency}_ms`;
  const setting = doc.entries.filter((e) => e.setting === chosen.setting && chosen.archs.includes(e.arch));
  const here = chosen.archs.map((arch) => setting.find((e) => e.arch === arch && sameLoad(e.load, chosen.load))).filter(Boolean);
  $("rate-title").textContent = doc.metrics[chosen.rate].title;
  overLoads("throughput-chart", doc, chosen, chosen.rate);
  overLoads("latency-chart", doc, chosen, time);
  $("throughput-note").textContent = restsOn(setting, `Whiskers: 95% confidence over replications.${banded(setting, chosen.rate)}`);
  $("latency-note").textContent = restsOn(setting, `${chosen.mark === "mean" ? "" : `${doc.marks[chosen.mark]} of each run, averaged over runs.`}${banded(setting, time)}`.trim());
  table(here, chosen, time);
  const counted = histogram("histogram-chart", doc, chosen);
  $("histogram-note").textContent = counted ? restsOn(here, "All counted requests of all replications together, on a logarithmic axis.") : "";
  breakdown("breakdown-chart", doc, here);
  $("breakdown-note").textContent = restsOn(here, "Means over replications.");
  const watched = doc.entries.find((e) => e.setting === chosen.setting && e.arch === chosen.watched && sameLoad(e.load, chosen.load));
  const series = watched && watched.series;
  timeline("timeline-chart", doc, series);
  $("timeline-note").textContent = series ? restsOn([watched],
    `One replication (seed ${series.seed}), averaged over bins of ${number(1000 * series.bin_s, 3)} ms. The whole run, warm-up included. Not admitted: arrived, without a launch yet. Queues are recorded at each launch. Bandwidth: bytes moved over the GPU's copy bandwidth, spread evenly over each launch.`, true) : "";
}

const banded = (entries, metric) => (entries.some((e) => e.bands[metric]) ? " Shaded: forward times at both ends of the profile's error bar." : "");

// Foundation of a chart: replications, labels and profile.
function restsOn(entries, more, oneRun = false) {
  if (!entries.length) return "";
  const counts = oneRun ? [] : uniq(entries.map((e) => e.n)).sort((a, b) => a - b);
  const grew = entries.filter((e) => e.grew);
  const parts = [];
  if (more) parts.push(more);
  if (counts.length) parts.push(counts[counts.length - 1] === 1 ? "One replication: no interval, no significance." : `${counts.length > 1 ? `${counts[0]} to ` : ""}${plural(counts[counts.length - 1], "replication")}.`);
  parts.push(grew.length
    ? `${grew.length} of ${plural(entries.length, "point")} ${uniq(grew.map((e) => e.stability)).join(", ")} (hollow or hatched): the queue kept growing, latencies would be longer in a longer run.`
    : `${entries.length > 1 ? "All" : "Label:"} ${uniq(entries.map((e) => e.stability)).join(", ")}.`);
  parts.push(uniq(entries.map((e) => (e.foundation === "measured run" ? "Measured run." : `Simulated, profile ${e.profile}: ${e.foundation}.`))).join(" "));
  return parts.join(" ");
}

const number = (v, digits = 4) => (v === null || v === undefined ? "–" : Number(v.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 3 }));

function withInterval(value) {
  if (!value || value[0] === null) return "–";
  return value[1] === null || value[1] === 0 ? number(value[0]) : `${number(value[0])} ± ${number(value[1], 2)}`;
}

// A paired difference: significant only if its interval excludes 0.
function difference(value) {
  if (!value || value[0] === null) return ["–", "unsure"];
  if (value[0] >= 9) return [`${number(value[0] + 1, 3)}×`, value[2] > 1 && value[0] > value[1] ? "" : "unsure"];
  const percent = `${value[0] >= 0 ? "+" : "−"}${Math.abs(100 * value[0]).toLocaleString("en", { maximumFractionDigits: 1 })}%`;
  if (value[2] < 2) return [percent, "unsure"];
  const interval = `${percent} ± ${(100 * value[1]).toLocaleString("en", { maximumFractionDigits: 1 })}`;
  return [interval, Math.abs(value[0]) > value[1] ? "" : "unsure"];
}

function table(entries, chosen, time) {
  const unit = doc.metrics[chosen.rate].unit;
  const marks = Object.entries(doc.marks).filter(([m]) => entries.some((e) => (e.values[`${m}_${chosen.latency}_ms`] || [null])[0] !== null));
  const heads = ["Architecture", "Label", `${doc.metrics[chosen.rate].title} (${unit})`, `vs ${chosen.against}`,
    ...marks.map(([, word]) => `${word} ${chosen.latency.toUpperCase()} (ms)`), `${doc.marks[chosen.mark]} vs ${chosen.against}`];
  const row = element("tr");
  row.append(...heads.map((h) => element("th", h, { scope: "col" })));
  $("comparison").tHead.replaceChildren(row);
  $("comparison").tBodies[0].replaceChildren(...entries.map((e) => {
    const line = element("tr");
    const name = element("td");
    const swatch = element("span", undefined, { className: "swatch" });
    swatch.style.background = colourOf(doc, e.arch);
    name.append(swatch, ` ${e.arch}`);
    const label = element("td");
    label.append(element("span", e.stability, { className: e.grew ? "label grew" : "label" }));
    const rival = e.arch === chosen.against ? null : e.against[chosen.against] || {};
    const versus = (metric) => (rival === null ? element("td", "reference", { className: "unsure" }) : ((d) => element("td", d[0], { className: d[1] }))(difference(rival[metric])));
    line.append(name, label, element("td", withInterval(e.values[chosen.rate])), versus(chosen.rate));
    for (const [m] of marks) {
      line.append(element("td", withInterval(e.values[`${m}_${chosen.latency}_ms`]), e.grew ? { className: "unsteady", title: "the queue kept growing" } : {}));
    }
    line.append(versus(time));
    return line;
  }));
  $("comparison-note").textContent = restsOn(entries, "± is the 95% interval over replications; differences are paired by seed. Grey italics: a difference that is not significant (its interval includes 0, or there is one replication), or a latency while the queue kept growing.");
}

function lead() {
  const runs = doc.sources.reduce((sum, s) => sum + Number(s.facts.points), 0);
  const counts = [...(doc.settings.length > 1 ? [plural(doc.settings.length, "setting")] : []), plural(doc.archs.length, "architecture"), plural(doc.loads.length, "load"), plural(runs, "run")];
  return `${doc.lead} ${counts.join(", ")}. ${uniq(doc.entries.map((e) => `Profile ${e.profile}: ${e.foundation}.`)).join(" ")}`;
}

function provenance() {
  const names = uniq(doc.sources.flatMap((s) => Object.keys(s.facts)));
  const table = element("table", undefined, { className: "sources" });
  const rows = [names, ...doc.sources.map((s) => names.map((n) => s.facts[n] || ""))];
  table.append(...rows.map((cells, i) => {
    const row = element("tr");
    row.append(...cells.map((text) => element(i ? "td" : "th", text)));
    return row;
  }));
  const scroll = element("div", undefined, { className: "scroll" });
  scroll.append(table);
  $("provenance").append(scroll);
  for (const [title, part] of [["Foundation of the profile", "provenance"], ["Configuration", "config"]]) {
    const kinds = uniq(doc.sources.map((s) => JSON.stringify(s[part])));
    for (const kind of kinds) {
      const of = doc.sources.filter((s) => JSON.stringify(s[part]) === kind).map((s) => s.facts.results);
      const more = element("details");
      const values = JSON.parse(kind);
      more.append(
        element("summary", kinds.length > 1 ? `${title} (${of.join(", ")})` : title),
        Object.keys(values).length ? facts(values) : element("p", "Not recorded, and the profile is not built in.", { className: "note" }));
      $("provenance").append(more);
    }
  }
}

function facts(values) {
  const list = element("dl", undefined, { className: "facts" });
  for (const [name, value] of Object.entries(values)) list.append(element("dt", name), element("dd", value));
  return list;
}

start();
