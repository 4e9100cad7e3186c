"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  // A page of one run has steps that were done again; one of two runs has a curve of each.
  const isOfTwo = facts.runs !== undefined;
  const line = (label, points, name, alpha = 1) => ({ label, points, name, alpha });
  const linesOf = (metric) =>
    isOfTwo
      ? metric.curves.map((curve, at) => line(facts.runs[at], curve, ["--curve", "--undone"][at])).filter((each) => each.points !== null)
      : [
          line("value", metric.curve, "--curve"),
          ...metric.undone.map((part, at) => line("before restart " + (at + 1), part, "--undone", 0.45)),
        ];
  const drawn = isOfTwo ? facts.drawn : facts.metrics.filter((metric) => metric.curve !== null);
  const restarts = isOfTwo ? [] : facts.attempts.slice(1).map((attempt) => attempt.first_step);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const HEIGHT = 200;
  const charts = [];

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

  // uPlot's own labels have three decimals, so that a learning rate of 0.0001 is 0.
  const exact = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 12 });
  const withExponent = (value) => value.toExponential().replace("e+", "e");
  const isPlain = (value) => value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6);

  // All labels of an axis are written alike.
  const labels = (_, values) => {
    const arePlain = isPlain(Math.max(...values.map(Math.abs)));
    return values.map((value) => (arePlain || value === 0 ? exact.format(value) : withExponent(Number(value.toPrecision(12)))));
  };

  const shown = (_, value) => {
    if (value === null || value === undefined) return "--";
    const rounded = Number(value.toPrecision(6));
    return isPlain(rounded) ? exact.format(rounded) : withExponent(rounded);
  };

  // About 7 pixels a character, and what is beside it: a tick, or the next label.
  const widthOf = (texts) => 20 + 7 * Math.max(4, ...texts.map((text) => text.length));

  const isFew = (steps) => steps.length < 40;

  const draw = (element) => {
    const lines = linesOf(drawn[Number(element.dataset.metric)]);
    const data = uPlot.join(lines.map(({ points }) => [points.steps, points.values]));
    const axis = () => ({ stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 } });
    const options = {
      width: element.clientWidth || 320,
      height: HEIGHT,
      scales: { x: { time: false } },
      cursor: { sync: { key: "steps" } },
      axes: [
        { ...axis(), space: (_, at, lowest, highest) => widthOf([exact.format(highest)]) },
        { ...axis(), values: labels, size: (_, texts) => widthOf(texts ?? []) },
      ],
      series: [
        { label: "step" },
        ...lines.map(({ label, points, name, alpha }) => ({
          label,
          alpha,
          value: shown,
          stroke: color(name),
          width: 1.5,
          points: { show: isFew(points.steps), fill: color(name) },
        })),
      ],
      hooks: { draw: [drawRestarts] },
    };
    const chart = new uPlot(options, data, element);
    chart.all = [data[0][0], data[0][data[0].length - 1]];
    return chart;
  };

  const drawAll = () => {
    for (const { chart } of charts) chart.destroy();
    charts.length = 0;
    for (const element of document.querySelectorAll(".chart")) charts.push({ element, chart: draw(element) });
  };

  const resize = () => {
    for (const { element, chart } of charts) chart.setSize({ width: element.clientWidth, height: HEIGHT });
  };

  // The arrow keys move the cursor from point to point, and Escape shows the whole curve again.
  const onKey = (event) => {
    const found = charts.find(({ element }) => element === event.target);
    if (found === undefined) return;
    const { chart } = found;
    const steps = chart.data[0];
    const last = steps.length - 1;
    const at = chart.cursor.idx ?? -1;
    const next = { ArrowLeft: at < 0 ? last : at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") chart.setScale("x", { min: chart.all[0], max: chart.all[1] });
    else if (next === undefined) return;
    else {
      const step = steps[Math.max(0, Math.min(last, next))];
      chart.setCursor({ left: chart.valToPos(step, "x"), top: HEIGHT / 4 });
    }
    event.preventDefault();
  };

  // What is folded on a screen is open on paper.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const element of opened) element.open = true;
  });
  addEventListener("afterprint", () => {
    for (const element of opened) element.open = false;
  });

  drawAll();
  addEventListener("resize", resize);
  addEventListener("keydown", onKey);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", drawAll);
  document.documentElement.dataset.charts = String(charts.length);
})();
