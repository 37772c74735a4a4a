// Keys of the whole page: "g" and a letter opens a view, "/" focuses its search field, "?" shows the help. They are ignored
// in text fields, and with Ctrl, Alt or Meta, which are the browser's shortcuts.

import { signal } from "@preact/signals";

import { navigate } from "./location";
import { isList } from "./place";
import { VIEWS } from "./views";

export const isHelpShown = signal(false);
/** "g" was pressed; the next letter opens a view. */
export const isChoosing = signal(false);

const CHOICE_MS = 2000;
let timer = 0;

function isTyping(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) {
    return false;
  }
  return target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName);
}

function choose(isOn: boolean): void {
  window.clearTimeout(timer);
  isChoosing.value = isOn;
  if (isOn) {
    timer = window.setTimeout(() => choose(false), CHOICE_MS);
  }
}

function focusSearch(): boolean {
  const field = document.querySelector<HTMLInputElement>("main [data-search]");
  field?.focus();
  field?.select();
  return field !== null;
}

function onKey(event: KeyboardEvent): void {
  if (event.key === "Escape" && isTyping(event.target) && !isHelpShown.peek()) {
    (event.target as HTMLElement).blur();
    return;
  }
  if (event.ctrlKey || event.altKey || event.metaKey || isTyping(event.target) || document.querySelector("dialog[open]")) {
    return;
  }
  if (isChoosing.peek()) {
    choose(false);
    const view = VIEWS.find((one) => one.key === event.key);
    if (view !== undefined) {
      event.preventDefault();
      navigate(view.name);
    }
    return;
  }
  if (event.key === "g" && !isList) {
    choose(true);
  } else if (event.key === "?" && !isList) {
    isHelpShown.value = true;
  } else if (event.key === "/" && focusSearch()) {
    event.preventDefault();
  }
}

export function startKeyboard(): void {
  document.addEventListener("keydown", onKey);
}
