"use strict";
// The charts of a page: of one run, or of two over each other.
const page = (() => {
  const HEIGHT = 200;
  const PAPER_WIDTH = 320;
  const TICKS = 5;
  const COLORS = ["--curve", "--second", "--third", "--fourth"];
  const DASHES = [[], [6, 3], [2, 2], [9, 3, 2, 3]];
  const root = document.documentElement;
  const settings = { isLog: false, smoothing: 0, find: "" };
  const charts = new Map();
  let facts, drawn, restarts;

  const line = (label, { steps, values }, at, more = {}) =>
    ({ label, steps, values, color: COLORS[at], dash: DASHES[at], alpha: 1, isQuiet: false, ...more });

  // What a chart has: the curves of metrics, with the steps that were done again.
  const linesOfMetric = (metric, at, isAlone) => {
    const before = (number) => (isAlone ? "" : metric.name + ", ") + "before restart " + number;
    return [
      line(isAlone ? "value" : metric.name, metric.curve, at),
      ...metric.undone.map((part, number) =>
        line(before(number + 1), part, at, { alpha: 0.5, dash: [2, 3], isUndone: true, isQuiet: !isAlone || metric.undone.length > 1 })),
    ];
  };

  const read = () => {
    facts = JSON.parse(document.getElementById("facts").textContent);
    if (facts.runs !== undefined) {
      restarts = [];
      drawn = facts.drawn.map(({ name, curves }) => ({
        name,
        lines: curves.flatMap((curve, at) => (curve === null ? [] : [line(facts.runs[at], curve, at)])),
      }));
      return;
    }
    const metrics = new Map(facts.metrics.map((metric) => [metric.name, metric]));
    restarts = facts.attempts.slice(1).map((attempt) => attempt.first_step);
    drawn = facts.charts.map((chart) => ({
      name: chart.metrics.join(" "),
      lines: chart.metrics.flatMap((name, at) => linesOfMetric(metrics.get(name), at, chart.metrics.length === 1)),
    }));
  };

  // TensorBoard's smoothing: an exponential moving average, divided by the sum of its weights, so
  // that its start isn't drawn to 0 (tensorboard/components/vz_line_chart2/line-chart.ts).
  const smoothed = (values, weight) => {
    let average = 0;
    let count = 0;
    return values.map((value) => {
      if (value === null) return null;
      count++;
      average = average * weight + value * (1 - weight);
      return average / (1 - weight ** count);
    });
  };

  // With smoothing, each curve is drawn twice: as it is, faint, and smoothed.
  const withSmoothing = (lines) =>
    settings.smoothing === 0
      ? lines
      : lines.flatMap((each) =>
          each.isUndone
            ? [each]
            : [{ ...each, alpha: 0.3 }, { ...each, label: each.label + ", smoothed", values: smoothed(each.values, settings.smoothing) }]);

  // Read once for all charts: each reading may cost a layout of the page.
  let palette = {};
  const readPalette = () => {
    const style = getComputedStyle(root);
    palette = Object.fromEntries([...COLORS, "--faint", "--line"].map((name) => [name, style.getPropertyValue(name).trim()]));
  };
  const color = (name) => palette[name];

  const drawRestarts = (chart) => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = color("--faint");
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    for (const step of restarts) {
      if (step < chart.scales.x.min || step > chart.scales.x.max) continue;
      const x = Math.round(chart.valToPos(step, "x", true));
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
    }
    ctx.stroke();
    ctx.restore();
  };

  // About 7 pixels a character, and what is beside it: a tick, or the next label.
  const widthOf = (texts) => 20 + 7 * Math.max(4, ...texts.map((text) => text.length));

  // A value between two others that aren't there has no line: it is a point.
  const lonely = ({ steps, values }) =>
    new Set(steps.filter((_, at) => values[at] !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null));

  // The vertical axis. uPlot gets values between 0 and 1: its own arithmetic fails for numbers that
  // are very large, very small or very close to each other.
  const scaleOf = (lines) => {
    const all = lines.flatMap(({ values }) => values.filter((value) => value !== null));
    const positive = all.filter((value) => value > 0);
    const isLog = settings.isLog && positive.length > 0;
    const some = isLog ? positive : all;
    const least = some.reduce((a, b) => Math.min(a, b), Infinity);
    const most = some.reduce((a, b) => Math.max(a, b), -Infinity);
    const [low, high] = some.length ? axes.range(least, most, isLog) : [0, 1];
    // A power of two: it changes no digit.
    const unit = 2 ** -Math.max(-1023, Math.min(1023, Math.floor(Math.log2(Math.max(Math.abs(low), Math.abs(high))))));
    const [from, to] = isLog ? [Math.log10(low), Math.log10(high)] : [low * unit, high * unit];
    const place = (value) => ((isLog ? Math.log10(value) : value * unit) - from) / (to - from);
    const valueAt = (at) => {
      if (isLog) return Math.max(5e-324, Math.min(Number.MAX_VALUE, 10 ** (from * (1 - at) + to * at)));
      return Math.max(-Number.MAX_VALUE, Math.min(Number.MAX_VALUE, low * (1 - at) + high * at));
    };
    const placed = (value) => (value === null || (isLog && value <= 0) ? null : place(value));
    return { isLog, place, placed, valueAt, spread: isLog ? 0 : most - least };
  };

  const draw = (element, width, zoom) => {
    const { lines: plain, name } = drawn[Number(element.dataset.chart)];
    const lines = withSmoothing(plain);
    const scale = scaleOf(lines);
    const data = uPlot.join(lines.map(({ steps, values }) => [steps, values.map(scale.placed)]));
    const originals = uPlot.join(lines.map(({ steps, values }) => [steps, values]));
    let labels = new Map();
    let base = "";
    const axis = () => ({ stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 } });
    const rows = (chart, _, low, high) => {
      const found = axes.ticks(scale.valueAt(low), scale.valueAt(high), TICKS, scale);
      const places = found.values.map(scale.place);
      labels = new Map(places.map((place, at) => [place, found.labels[at]]));
      base = found.base;
      return places;
    };
    const steps = (chart, _, low, high) => {
      const most = Math.max(1, Math.floor(width / widthOf([axes.shown(high)]) - 1));
      return axes.ticks(low, high, most, { least: 1 }).values;
    };
    const drawBase = ({ ctx, bbox }) => {
      if (base === "") return;
      ctx.save();
      ctx.fillStyle = color("--faint");
      ctx.textAlign = "left";
      ctx.textBaseline = "bottom";
      ctx.fillText(base + " +", 4, bbox.top - 4);
      ctx.restore();
    };
    const options = {
      width,
      height: HEIGHT,
      padding: [20, null, null, null],
      scales: {
        x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: {
          range: (_, low, high) =>
            low === null ? [0, 1] : axes.range(scale.valueAt(low), scale.valueAt(high), scale.isLog).map(scale.place),
        },
      },
      cursor: { sync: { key: "steps" } },
      axes: [
        { ...axis(), splits: steps, values: (_, some) => some.map((step) => axes.shown(step, 1)) },
        { ...axis(), splits: rows, values: (_, places) => places.map((place) => labels.get(place)), size: (_, texts) => widthOf(texts ?? []) },
      ],
      series: [
        { label: "step" },
        ...lines.map((each, at) => {
          const points = lonely(each);
          return {
            label: each.label,
            class: each.isQuiet ? "quiet" : null,
            alpha: each.alpha,
            dash: each.dash,
            value: (_, __, series, index) => axes.shown(index === null ? null : originals[series][index], scale.spread),
            stroke: color(each.color),
            width: 1.5,
            pxAlign: 0,
            points: {
              show: !each.isUndone && each.steps.length < 40,
              filter: (_, __, isShown) => (isShown ? null : data[0].flatMap((step, index) => (points.has(step) ? [index] : []))),
              fill: color(each.color),
              size: 5,
            },
          };
        }),
      ],
      hooks: { draw: [drawRestarts, drawBase] },
    };
    const chart = new uPlot(options, data, element);
    chart.name = name;
    chart.all = [data[0][0], data[0][data[0].length - 1]];
    if (zoom !== null) chart.setScale("x", zoom);
    return chart;
  };

  // What a chart shows of its steps; null if it shows all.
  const zoomOf = (chart) => {
    const { min, max } = chart.scales.x;
    return min > chart.all[0] || max < chart.all[1] ? { min, max } : null;
  };

  // Folded charts are drawn when they are opened.
  const drawMissing = (before = new Map()) => {
    const isPaper = root.classList.contains("paper");
    const missing = [...document.querySelectorAll(".chart")].filter((element) => !charts.has(element) && element.checkVisibility());
    const widths = missing.map((element) => (isPaper ? PAPER_WIDTH : element.clientWidth));
    missing.forEach((element, at) => {
      const old = before.get(element);
      const isSame = old !== undefined && old.name === drawn[Number(element.dataset.chart)].name;
      const chart = draw(element, widths[at], isSame ? zoomOf(old) : null);
      if (isSame && old.cursor.left >= 0) chart.setCursor({ left: old.cursor.left, top: old.cursor.top });
      charts.set(element, chart);
    });
    root.dataset.charts = String(charts.size);
  };

  const drawAll = () => {
    const before = new Map(charts);
    for (const chart of charts.values()) chart.destroy();
    charts.clear();
    readPalette();
    drawMissing(before);
  };

  const resize = () => {
    const widths = [...charts.keys()].map((element) => element.clientWidth);
    [...charts.values()].forEach((chart, at) => {
      if (widths[at] > 0 && widths[at] !== chart.width) chart.setSize({ width: widths[at], height: HEIGHT });
    });
    drawMissing();
  };

  // The arrow keys move the cursor from point to point, + and - zoom, Escape shows the whole curve.
  const onKey = (event) => {
    const chart = charts.get(event.target);
    if (chart === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = chart.data[0];
    const last = steps.length - 1;
    const at = chart.cursor.idx ?? -1;
    const next = { ArrowLeft: at < 0 ? last : at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    const factor = { "+": 0.5, "-": 2 }[event.key];
    if (event.key === "Escape") chart.setScale("x", { min: chart.all[0], max: chart.all[1] });
    else if (factor !== undefined) {
      const { min, max } = chart.scales.x;
      const middle = steps[at] ?? (min + max) / 2;
      const [low, high] = [middle - (middle - min) * factor, middle + (max - middle) * factor];
      chart.setScale("x", { min: Math.max(chart.all[0], low), max: Math.min(chart.all[1], high) });
    } else if (next !== undefined) {
      const step = steps[Math.max(0, Math.min(last, next))];
      chart.setCursor({ left: chart.valToPos(step, "x"), top: HEIGHT / 4 });
    } else return;
    event.preventDefault();
  };

  const find = () => {
    const wanted = settings.find.toLowerCase();
    for (const figure of document.querySelectorAll("figure")) {
      const { name } = drawn[Number(figure.querySelector(".chart").dataset.chart)];
      figure.hidden = !name.toLowerCase().includes(wanted);
    }
    if (wanted !== "") for (const more of document.querySelectorAll("details.more")) more.open = true;
    resize();
  };

  const onSetting = ({ target }) => {
    if (target.id === "log") settings.isLog = target.checked;
    else if (target.id === "smoothing") {
      settings.smoothing = Number(target.value);
      document.getElementById("smoothed").textContent = target.value;
    } else if (target.id === "find") settings.find = target.value;
    else return;
    if (target.id === "find") find();
    else drawAll();
  };

  // On paper all is open, light, and as wide as half a sheet.
  let opened = [];
  addEventListener("beforeprint", () => {
    root.classList.add("paper");
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const element of opened) element.open = true;
    drawAll();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("paper");
    for (const element of opened) element.open = false;
    drawAll();
  });

  const update = () => {
    read();
    for (const controls of document.querySelectorAll(".controls")) controls.hidden = false;
    drawAll();
    find();
  };

  update();
  addEventListener("resize", resize);
  addEventListener("toggle", resize, true);
  addEventListener("keydown", onKey);
  addEventListener("input", onSetting);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  return { charts, smoothed, update };
})();
