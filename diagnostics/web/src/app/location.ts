// The route of the page: the view, its object and every selection, all in the URL's hash. A copied URL shows the same
// content to another user, a reload loses nothing, and the server needs no routes for views.
//
//   #/heat?operation=forward-compute&measure=max&round=3      #/incidents/000123

import { signal } from "@preact/signals";

export interface Route {
  /** The first part of the path: "overview", "heat", ... */
  view: string;
  /** The parts after it: the id of an incident, the name of a host. */
  rest: string[];
  params: URLSearchParams;
}

export type ParamValue = string | number | boolean | null | undefined;

const HOME = "overview";

// Browsers reject more than about 100 writes of the URL in 30 s; a drag would make 60 a second.
const WRITE_DELAY_MS = 250;

/** Parameters that are kept when another view is opened. */
const CARRIED = ["round", "from", "to", "axis"];

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function parseRoute(hash: string): Route {
  const text = hash.replace(/^#\/?/, "");
  const cut = text.indexOf("?");
  const path = cut < 0 ? text : text.slice(0, cut);
  const parts = path.split("/").filter((part) => part !== "").map(decoded);
  return {
    view: parts[0] ?? HOME,
    rest: parts.slice(1),
    params: new URLSearchParams(cut < 0 ? "" : text.slice(cut + 1)),
  };
}

export function routeText(route: Route): string {
  const path = [route.view, ...route.rest].map(encodeURIComponent).join("/");
  const query = route.params.toString();
  return query === "" ? `#/${path}` : `#/${path}?${query}`;
}

/** The route that the page is opened with. Parameters before the hash are accepted too: "/?round=3", "/?round=3#/heat". */
function firstRoute(): Route {
  const found = parseRoute(window.location.hash);
  for (const [name, value] of new URLSearchParams(window.location.search)) {
    if (!found.params.has(name)) {
      found.params.set(name, value);
    }
  }
  if (window.location.search !== "") {
    window.history.replaceState(null, "", window.location.pathname + routeText(found));
  }
  return found;
}

/** The current route. Components that read `.value` are drawn again when it changes. */
export const route = signal<Route>(firstRoute());

let pendingWrite = 0;

function takeFromUrl(): void {
  window.clearTimeout(pendingWrite);
  pendingWrite = 0;
  if (window.location.hash !== routeText(route.peek())) {
    route.value = parseRoute(window.location.hash);
  }
}

window.addEventListener("hashchange", takeFromUrl);
window.addEventListener("popstate", takeFromUrl);

/** Write a pending change to the URL now, for example before the URL is copied. */
export function flushLocation(): void {
  if (pendingWrite !== 0) {
    window.clearTimeout(pendingWrite);
    pendingWrite = 0;
    window.history.replaceState(null, "", routeText(route.peek()));
  }
}

function changed(params: URLSearchParams, changes: Record<string, ParamValue>): URLSearchParams {
  const next = new URLSearchParams(params);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") {
      next.delete(name);
    } else {
      next.set(name, String(value));
    }
  }
  return next;
}

/** Change parameters of this view; null, undefined and "" remove one. With isNewEntry the back button undoes the change. */
export function setParams(changes: Record<string, ParamValue>, options: { isNewEntry?: boolean } = {}): void {
  const now = route.peek();
  const next: Route = { ...now, params: changed(now.params, changes) };
  if (routeText(next) === routeText(now)) {
    return;
  }
  if (options.isNewEntry === true) {
    flushLocation();
    window.history.pushState(null, "", routeText(next));
  } else if (pendingWrite === 0) {
    pendingWrite = window.setTimeout(flushLocation, WRITE_DELAY_MS);
  }
  route.value = next;
}

/** Return the link to a view, "incidents" or ["incidents", id], with parameters. */
export function hrefOf(path: string | readonly string[], params: Record<string, ParamValue> = {}): string {
  const parts = typeof path === "string" ? [path] : path;
  const kept = new URLSearchParams();
  for (const name of CARRIED) {
    const value = route.value.params.get(name);
    if (value !== null) {
      kept.set(name, value);
    }
  }
  return routeText({ view: parts[0] ?? HOME, rest: parts.slice(1), params: changed(kept, params) });
}

/** Open a view, like a click on its link. */
export function navigate(path: string | readonly string[], params: Record<string, ParamValue> = {}): void {
  const href = hrefOf(path, params);
  flushLocation();
  window.location.hash = href;
}

export function useRoute(): Route {
  return route.value;
}

/** Return a parameter of this view and its setter; the default value is not written to the URL. */
export function useParam(name: string, fallback: string): [string, (value: string) => void] {
  const value = route.value.params.get(name) ?? fallback;
  return [value, (next) => setParams({ [name]: next === fallback ? null : next })];
}

/** Return an integer of some parameters; null if it is absent, or another text. */
export function numberOf(params: URLSearchParams, name: string): number | null {
  const text = params.get(name);
  return text !== null && /^-?\d{1,12}$/.test(text) ? Number(text) : null;
}

/** Return an integer parameter of this view and its setter. */
export function useNumberParam(name: string): [number | null, (value: number | null) => void] {
  return [numberOf(route.value.params, name), (next) => setParams({ [name]: next })];
}
