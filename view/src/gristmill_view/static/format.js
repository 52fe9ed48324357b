// Numbers, times and links as people read them.
import { known, NONE } from "./dom.js";

/** Three significant digits: 0.00123, 12.3, 4,560, 1.2e-7. */
export function figure(value) {
  if (!Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** A fixed number of decimals for rewards, so that columns do not dance. */
export const reward = (value) =>
  !Number.isFinite(value) ? NONE
    : Math.abs(value) >= 100 ? figure(value) : value.toFixed(Math.abs(value) >= 10 ? 1 : 2);

export const signed = (value) => (value > 0 ? "+" : "") + reward(value).replace("-", "−");

export const percent = (value) =>
  !Number.isFinite(value) ? NONE : `${figure(100 * value)} %`;

export const count = (value) => (known(value) ? value.toLocaleString("en") : NONE);

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

/** A large number in short: 1.2M. */
export const short = (value) => (Number.isFinite(value) ? COMPACT.format(value) : NONE);

export const plural = (number, one, many = one + "s") => `${count(number)} ${number === 1 ? one : many}`;

/** A duration: 0.4 s, 12 s, 3 min, 2 h 5 min, 4 d. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d`;
}

export const moment = (ms) => !known(ms) ? NONE
  : new Date(ms).toLocaleString("en", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });

/** Links. Ids go through encodeURIComponent, so an id cannot change the path. */
const part = encodeURIComponent;
export const links = {
  runs: () => "/view",
  run: (run) => `/view/${part(run)}`,
  step: (run, step) => `/view/${part(run)}/step/${step}`,
  group: (run, group, sequence, token) => `/view/${part(run)}/group/${part(group)}` +
    (sequence === undefined ? "" : `#s${sequence}${token === undefined ? "" : `t${token}`}`),
  metrics: (run) => `/view/${part(run)}/metrics`,
  prompt: (run, group) => `/view/${part(run)}/prompt/${part(group)}`,
  rollouts: (run, filters = {}) => `/view/${part(run)}/rollouts${query(filters)}`,
  compare: (runs = []) => "/view/compare" + (runs.length ? `?runs=${runs.map(part).join(",")}` : ""),
};

/** Returns a query of an address. A list gives one parameter for each of its values. */
export function query(values) {
  const kept = Object.entries(values).flatMap(([name, value]) => [value].flat().map((one) => [name, one])).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return kept.length ? "?" + new URLSearchParams(kept) : "";
}

/** Words of a code such as all_scores_same. */
export const words = (name) => String(name).replaceAll("_", " ");

/** One of five classes from low to high: one scale for all values of a page. */
export function shade(value, low, high) {
  if (!Number.isFinite(value)) return "shade-none";
  if (high - low < 1e-9) return "shade-2";
  return `shade-${Math.min(4, Math.max(0, Math.round(4 * (value - low) / (high - low))))}`;
}
