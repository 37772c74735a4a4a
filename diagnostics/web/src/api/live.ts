// What is new: one stream of events from the server. It says which views have news, and a view that is shown asks for them.
// The browser's own reconnection gives up at the first refusal, so this one is ours: it waits longer each time, up to ten
// seconds, and tries at once when the page becomes visible or the network comes back. A browser has six connections to a
// server for all its pages together: a page that nobody sees soon gives its own back, and asks how the job is now and then.

import { effect, signal } from "@preact/signals";

import { apiUrl, forgetAnswers, getJson, isSignedOut } from "./client";
import type { JobDocument, JobsDocument, LiveDocument } from "./documents";
import { isList } from "../app/place";

export type Connection = "connecting" | "live" | "reconnecting" | "recorded";

export const connection = signal<Connection>("connecting");
/** Since when the stream is broken, in unix seconds; null while it is not. */
export const brokenSince = signal<number | null>(null);
/** By view: a number that grows when there is something new. */
export const versions = signal<Record<string, number>>({});
/** The newest step that all ranks completed. */
export const newestStep = signal<number | null>(null);
/** Grows when all that was asked has to be asked again: the server began anew, or the stream was broken. */
export const epoch = signal(0);
/** The server's clock minus ours, in seconds: ages are right on a laptop whose clock is wrong. */
export const clockOffset = signal(0);
/** Grows now and then while the page is out of sight and has no stream: its title is to tell of trouble all the same. */
export const unseenTicks = signal(0);

const ORDINARY_WAIT_MS = 50;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;
// Without a word for so long the connection may be gone without a sign: a laptop slept.
const SILENCE_MS = 45_000;
// A glance at another page is no reason to give the stream up.
const UNSEEN_MS = 5000;
const UNSEEN_PERIOD_MS = 30_000;

let source: EventSource | null = null;
let timer = 0;
let unseenTimer = 0;
let waitMs = FIRST_WAIT_MS;
let session = "";
let heardAt = 0;
let isFirstRetry = false;

/** Take the server's clock from what it told just now. */
export function takeServerTime(atUnixS: number): void {
  clockOffset.value = atUnixS - Date.now() / 1000;
}

function isLiveDocument(value: unknown): value is LiveDocument {
  const told = value as Partial<LiveDocument> | null;
  return typeof told === "object" && told !== null && typeof told.session === "string" && typeof told.versions === "object";
}

function take(text: string): void {
  let told: unknown;
  try {
    told = JSON.parse(text);
  } catch {
    return;
  }
  if (!isLiveDocument(told)) {
    return;
  }
  heardAt = Date.now();
  isFirstRetry = false;
  waitMs = FIRST_WAIT_MS;
  takeServerTime(told.at_unix_s);
  const isAnother = session !== "" && session !== told.session;
  const wasBroken = brokenSince.peek() !== null;
  session = told.session;
  if (isAnother) {
    forgetAnswers();
  }
  if (isAnother || wasBroken) {
    epoch.value += 1;
  }
  brokenSince.value = null;
  connection.value = "live";
  newestStep.value = told.step;
  versions.value = told.versions;
}

function close(): void {
  window.clearTimeout(timer);
  source?.close();
  source = null;
}

function retry(): void {
  close();
  // The server ends a stream after a while. That the next one opens at once is nothing that anybody needs to see.
  const isOrdinary = connection.peek() === "live";
  if (isOrdinary && !isFirstRetry) {
    isFirstRetry = true;
    timer = window.setTimeout(open, ORDINARY_WAIT_MS);
    return;
  }
  if (brokenSince.peek() === null) {
    brokenSince.value = Date.now() / 1000;
  }
  connection.value = "reconnecting";
  // Spread, so that not all pages come back in the same instant.
  timer = window.setTimeout(open, waitMs * (0.75 + Math.random() / 2));
  waitMs = Math.min(waitMs * 2, LONGEST_WAIT_MS);
}

async function probe(): Promise<void> {
  // The stream does not say why it was refused; an ordinary question does: 401 opens the page for signing in.
  try {
    await getJson<JobDocument | JobsDocument>(isList ? "jobs" : "job");
  } catch {
    return;
  }
}

function open(): void {
  close();
  if (isSignedOut.peek()) {
    return;
  }
  const opened = new EventSource(apiUrl("live"));
  source = opened;
  opened.addEventListener("change", (event) => take((event as MessageEvent<string>).data));
  opened.onerror = () => {
    if (source === opened) {
      retry();
      void probe();
    }
  };
}

function leave(): void {
  close();
  unseenTicks.value += 1;
  unseenTimer = window.setTimeout(leave, UNSEEN_PERIOD_MS);
}

function isUnseen(): boolean {
  window.clearTimeout(unseenTimer);
  if (document.visibilityState === "visible") {
    return false;
  }
  unseenTimer = window.setTimeout(leave, UNSEEN_MS);
  return true;
}

function lookAgain(): void {
  if (isUnseen()) {
    return;
  }
  const isGone = source === null && connection.peek() !== "reconnecting"; // the browser had put the page away
  const isQuiet = Date.now() - heardAt > SILENCE_MS;
  if (isGone || isQuiet || connection.peek() === "reconnecting") {
    waitMs = FIRST_WAIT_MS;
    open();
  }
}

/** Begin to listen. A recorded job never has news: nothing is listened to. */
export function startLive(isRecorded: boolean): void {
  if (isRecorded) {
    connection.value = "recorded";
    return;
  }
  heardAt = Date.now();
  document.addEventListener("visibilitychange", lookAgain);
  window.addEventListener("online", lookAgain);
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", lookAgain);
  effect(() => {
    if (isSignedOut.value) {
      close();
    } else {
      open();
    }
  });
  isUnseen(); // a page may be opened in the background
}
