"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const [width, , left, right] = data.size;

// Index of the point of a curve that is nearest to a step.
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
}

function shortNumber(value) {
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}

for (const picture of document.querySelectorAll("svg.panel")) {
  const panel = data.panels[picture.dataset.panel];
  const last = Math.max(panel.last, 1), line = picture.querySelector(".cursor");
  const legend = [...picture.nextElementSibling.children];
  const names = panel.series.map(series => series.name);
  const steps = [...new Set(panel.series.flatMap(series => series.steps))].sort((a, b) => a - b);
  let at = steps.length - 1;

  function show(index) {
    at = Math.min(Math.max(index, 0), steps.length - 1);
    const x = left + (width - left - right) * steps[at] / last;
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    line.style.visibility = "visible";
    panel.series.forEach((series, i) => {
      const point = nearest(series.steps, steps[at]);
      const value = document.createElement("b");
      value.textContent = shortNumber(series.values[point]);
      const step = series.steps[point].toLocaleString("en");
      legend[i].replaceChildren(legend[i].firstChild, names[i] + " ", value, " at step " + step);
    });
  }

  function hide() {
    line.style.visibility = "hidden";
    legend.forEach((each, i) => each.replaceChildren(each.firstChild, names[i]));
  }

  picture.addEventListener("pointermove", event => {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) * width / box.width;
    show(nearest(steps, (x - left) / (width - left - right) * last));
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("focus", () => { if (picture.matches(":focus-visible")) show(at); });
  picture.addEventListener("keydown", event => {
    const far = Math.max(1, Math.round(steps.length / 20));
    const moves = {ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - far, PageDown: at + far, Home: 0, End: steps.length - 1};
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}

// Numbers sort as numbers, everything else as text; empty cells come last.
function compareCells(a, b) {
  if (!a || !b) return a ? -1 : b ? 1 : 0;
  const [x, y] = [a, b].map(text => parseFloat(text.replaceAll(",", "")));
  return isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y;
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    button.title = "Sort by this column";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(each => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = row => row.cells[column].textContent.trim();
      const rows = [...table.tBodies[0].rows].sort((a, b) =>
        text(a) && text(b) && down ? compareCells(text(b), text(a)) : compareCells(text(a), text(b)));
      table.tBodies[0].append(...rows);
    });
  });
}

for (const form of document.querySelectorAll("form.filter")) {
  const rows = [...document.getElementById(form.dataset.table).tBodies[0].rows];
  const [search, kind, count] = ["input", "select", ".count"].map(name => form.querySelector(name));
  const whole = count.textContent;
  function filter() {
    const wanted = search.value.toLowerCase();
    let shown = 0;
    for (const row of rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted) || (kind.value && !row.classList.contains(kind.value));
      shown += !row.hidden;
    }
    count.textContent = search.value || kind.value ? shown + " of " + rows.length + " shown" : whole;
  }
  form.addEventListener("input", filter);
  form.addEventListener("submit", event => event.preventDefault());
}

// Tokens of samples by their properties: text, type, weight, loss and loss without a prompt.
const KINDS = ["given", "learned", "special"];
const LEGENDS = {
  type: "Colors: learned tokens and special ones; given ones have none.",
  weight: "Full color: the largest loss weight.",
  loss: "Full color: a loss of 5 nats or more. Point at a token to read its numbers.",
  gain: "The loss of a token falls (green) or rises (red) by up to 5 nats.",
};
const MEASURES = {
  type: token => [token[1], token[1] ? 1 : 0],
  weight: token => ["weight", token[2]],
  loss: token => ["loss", (token[3] ?? 0) / 5],
  gain: token => [token[4] > token[3] ? "fall" : "rise", Math.abs((token[4] ?? token[3]) - token[3]) / 5],
};

function markedToken(token, by, largest) {
  const [text, kind, weight, loss, bare] = token, mark = document.createElement("span");
  const [name, share] = MEASURES[by](token);
  mark.textContent = text;
  mark.className = "mark by-" + name;
  mark.style.setProperty("--share", Math.min(share / (by === "weight" ? largest : 1), 1));
  mark.title = [KINDS[kind], "weight " + weight, loss === null ? "no loss" : "loss " + loss, bare === null ? "" : bare + " without prompt"].filter(Boolean).join(", ");
  return mark;
}

for (const choice of document.querySelectorAll("select.color")) {
  const tokens = data.tokens[choice.dataset.run], form = choice.form;
  const rows = [...document.getElementById(form.dataset.table).tBodies[0].rows];
  const legend = form.parentElement.querySelector("#" + form.dataset.table + "legend");
  const largest = Math.max(...Object.values(tokens).flat(2).map(token => token[2]), 1e-9);
  choice.addEventListener("change", () => {
    legend.hidden = !choice.value;
    legend.textContent = LEGENDS[choice.value] ?? "";
    for (const row of rows) {
      const parts = tokens[row.cells[0].textContent];
      row.querySelectorAll("td.tokens").forEach((cell, part) => {
        cell.dataset.whole ??= cell.textContent;
        if (!choice.value || !parts) cell.textContent = cell.dataset.whole;
        else cell.replaceChildren(...parts[part].map(token => markedToken(token, choice.value, largest)));
      });
    }
  });
}

// What is folded on the screen is printed as well.
addEventListener("beforeprint", () => document.querySelectorAll("details:not([open])").forEach(each => {
  each.open = true;
  each.dataset.folded = "";
}));
addEventListener("afterprint", () => document.querySelectorAll("details[data-folded]").forEach(each => {
  each.open = false;
  delete each.dataset.folded;
}));
