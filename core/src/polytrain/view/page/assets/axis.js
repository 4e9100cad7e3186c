"use strict";
// Ranges, ticks and labels of an axis, for any finite numbers.
const axes = (() => {
  const MOST = Number.MAX_VALUE;
  const clamped = (value) => Math.max(-MOST, Math.min(MOST, value));

  // What an axis shows of values between two numbers: a twentieth more, but no further than 0. It
  // is never so narrow that numbers, which have 16 digits, can't be told apart.
  const range = (low, high, isLog = false) => {
    if (isLog) {
      const factor = Math.max(1 + 1e-12, low === high ? 1.25 : 10 ** ((Math.log10(high) - Math.log10(low)) / 20));
      return [Math.max(5e-324, low / factor), clamped(Math.max(1e-322, high * factor))];
    }
    const size = Math.max(Math.abs(low), Math.abs(high));
    const narrow = Math.max(size * 1e-13, 1e-322);
    const missing = (narrow - (high - low)) / 2;
    const pad = size === 0 ? 1 : low === high ? Math.max(size / 10, narrow) : Math.max(missing, high * 0.05 - low * 0.05);
    const stop = (value, padded) => (value >= 0 !== padded >= 0 && low * high >= 0 ? 0 : clamped(padded));
    const [from, to] = [stop(low, low - pad), stop(high, high + pad)];
    return to - from < narrow ? [clamped(low - narrow), clamped(high + narrow)] : [from, to];
  };

  // A tick is a decimal number, `digits` times ten to the `power`: so its label is exact.
  const valueOf = ({ digits, power }) => Number(digits + "e" + power);

  const linear = (low, high, most, least) => {
    const rough = Math.max(high / most - low / most, least, 5e-324);
    let power = Math.floor(Math.log10(rough)) - 1;
    let step = [10, 20, 25, 50, 100].find((each) => Number(each + "e" + power) >= rough);
    if (step === undefined) [step, power] = [20, power + 1];
    const size = Number(step + "e" + power);
    const ticks = [];
    for (let at = Math.ceil(low / size); at * size <= high; at++) ticks.push({ digits: at * step, power });
    return ticks.filter((tick) => valueOf(tick) >= low && valueOf(tick) <= high);
  };

  const logarithmic = (low, high, most) => {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.ceil((last - first) / most) || 1;
    const ticksOf = (steps) => {
      const ticks = [];
      for (let power = Math.ceil(first / every) * every; power <= last; power += every)
        for (const digits of steps) ticks.push({ digits, power });
      return ticks.filter((tick) => valueOf(tick) >= low && valueOf(tick) <= high);
    };
    const wide = ticksOf([1]);
    if (wide.length > 2) return wide;
    const narrow = ticksOf([1, 2, 5]);
    return narrow.length > 2 ? narrow : linear(low, high, most, 0);
  };

  const grouped = (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ",");

  // A decimal number as text, without zeros at its end.
  const text = ({ digits, power }, isPlain) => {
    const sign = digits < 0 ? "-" : "";
    const all = BigInt(Math.abs(digits)).toString();
    const kept = all.replace(/0+$/, "");
    if (kept === "") return "0";
    const zeros = power + all.length - kept.length;
    if (!isPlain) {
      const fraction = kept.length > 1 ? "." + kept.slice(1) : "";
      return sign + kept[0] + fraction + "e" + (zeros + kept.length - 1);
    }
    if (zeros >= 0) return sign + grouped(kept + "0".repeat(zeros));
    const padded = kept.padStart(1 - zeros, "0");
    return sign + grouped(padded.slice(0, zeros)) + "." + padded.slice(zeros);
  };

  const isPlain = (value) => value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6);
  const LONGEST = 9;

  // All labels of an axis are written alike. What long ones have in common is its base: they are
  // then what is to be added to it.
  const labelled = (ticks) => {
    const values = ticks.map(valueOf);
    const areOfOnePower = ticks.every(({ power }) => power === ticks[0].power);
    const write = (some) => {
      const arePlain = isPlain(Math.max(...some.map((tick) => Math.abs(valueOf(tick)))));
      return some.map((tick) => text(tick, areOfOnePower ? arePlain : isPlain(valueOf(tick))));
    };
    const labels = write(ticks);
    if (!areOfOnePower || labels.every((label) => label.length <= LONGEST)) return { values, labels, base: "" };
    const [first, last] = [ticks[0].digits, ticks[ticks.length - 1].digits];
    const shared = 10 ** Math.ceil(Math.log10(last - first + 1));
    const below = { digits: Math.floor(first / shared) * shared, power: ticks[0].power };
    // Below the lowest ticks there may be no number any more.
    const base = Number.isFinite(valueOf(below)) ? below : { ...below, digits: Math.ceil(last / shared) * shared };
    const rest = write(ticks.map(({ digits, power }) => ({ digits: digits - base.digits, power })));
    return { values, labels: rest.map((label) => (label.startsWith("-") ? "" : "+") + label), base: text(base, isPlain(valueOf(base))) };
  };

  // The ticks between two numbers: their values and labels, and the base of the labels, if any.
  const ticks = (low, high, most, { isLog = false, least = 0 } = {}) =>
    labelled(isLog ? logarithmic(low, high, most) : linear(low, high, most, least));

  // A value to so many digits that it can be told from others of its range.
  const shown = (value, spread = 0) => {
    if (value === null || value === undefined) return "--";
    const needed = spread > 0 && value !== 0 ? Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(spread)) + 4 : 0;
    const rounded = value.toExponential(Math.min(16, Math.max(6, needed) - 1));
    const [mantissa, exponent] = rounded.split("e");
    const [whole, fraction = ""] = mantissa.split(".");
    const tick = { digits: Number(whole + fraction), power: Number(exponent) - fraction.length };
    return text(tick, isPlain(value));
  };

  return { range, ticks, shown };
})();
