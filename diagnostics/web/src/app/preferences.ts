// What a person likes, kept by the browser: theme, time zone and the charts' axis. Everything else about the page is in its URL.

import { computed, effect, signal } from "@preact/signals";

export type Theme = "system" | "light" | "dark";
export type Clock = "local" | "utc";

const THEME_KEY = "megatrain.theme";
const CLOCK_KEY = "megatrain.clock";
const AXIS_KEY = "megatrain.axis";

function stored(key: string): string | null {
  try {
    return window.localStorage.getItem(key);
  } catch {
    return null; // storage may be forbidden
  }
}

function store(key: string, value: string): void {
  try {
    window.localStorage.setItem(key, value);
  } catch {
    // as above: the choice lasts as long as the page
  }
}

function storedTheme(): Theme {
  const value = stored(THEME_KEY);
  return value === "light" || value === "dark" ? value : "system";
}

const darkQuery = window.matchMedia("(prefers-color-scheme: dark)");
const isSystemDark = signal(darkQuery.matches);
darkQuery.addEventListener("change", (event) => {
  isSystemDark.value = event.matches;
});

export const theme = signal<Theme>(storedTheme());
/** What is shown: pictures on a canvas are drawn again when it changes. */
export const shownTheme = computed<"light" | "dark">(() => {
  if (theme.value !== "system") {
    return theme.value;
  }
  return isSystemDark.value ? "dark" : "light";
});
export const clock = signal<Clock>(stored(CLOCK_KEY) === "utc" ? "utc" : "local");

effect(() => {
  document.documentElement.dataset["theme"] = shownTheme.value;
  store(THEME_KEY, theme.value);
});

effect(() => store(CLOCK_KEY, clock.value));

/** What charts go over where the URL does not say. */
export const chartAxis = signal<"step" | "time">(stored(AXIS_KEY) === "time" ? "time" : "step");
effect(() => store(AXIS_KEY, chartAxis.value));

/** Return the value of a design token of the shown theme: a colour for a canvas. */
export function token(name: string): string {
  // the signal is read, so that whoever draws with the colour is drawn again with the theme
  void shownTheme.value;
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
