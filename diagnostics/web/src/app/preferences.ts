// Preferences stored by the browser: theme, time zone and the axis of charts. All other state of the page is in its URL.

import { computed, effect, signal } from "@preact/signals";

import { store, stored } from "./storage";

export type Theme = "system" | "light" | "dark";
export type Clock = "local" | "utc";

const THEME_KEY = "megatrain.theme";
const CLOCK_KEY = "megatrain.clock";
const AXIS_KEY = "megatrain.axis";

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
/** The theme in effect. Canvases are drawn again when it changes. */
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

/** The axis of charts if the URL does not set one. */
export const chartAxis = signal<"step" | "time">(stored(AXIS_KEY) === "time" ? "time" : "step");
effect(() => store(AXIS_KEY, chartAxis.value));

/** Return the value of a design token in the current theme, such as a color for a canvas. */
export function token(name: string): string {
  // reading the signal makes the caller depend on the theme
  void shownTheme.value;
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
