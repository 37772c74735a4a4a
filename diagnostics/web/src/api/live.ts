// One stream of events from the server. Each event lists the version of every topic; a visible view then reads its data again.
// Reconnection: the delay doubles up to ten seconds, and a retry is immediate when the page becomes visible or the network
// returns. A browser opens at most six connections to a server for all its pages together, so a hidden page closes its stream
// and polls the state of the job.

import { effect, signal } from "@preact/signals";

import { forgetAnswers, isSignedOut } from "./client";
import type { LiveDocument } from "./documents";
import { readEvents } from "./event_stream";

export type Connection = "connecting" | "live" | "reconnecting" | "recorded";

export const connection = signal<Connection>("connecting");
/** When the stream broke, in unix seconds; null while it works. */
export const brokenSince = signal<number | null>(null);
/** By topic: a number that increases with each change. */
export const versions = signal<Record<string, number>>({});
/** The newest step that all ranks completed. */
export const newestStep = signal<number | null>(null);
/** Increases when all data must be read again: the server restarted, the stream was broken, or the user of the list of jobs changed. */
export const epoch = signal(0);
/** The server's clock minus the browser's, in seconds: ages are correct even if the browser's clock is wrong. */
export const clockOffset = signal(0);
/** Increases periodically while the page is hidden and has no stream, so that its title still shows the job's health. */
export const unseenTicks = signal(0);

const ORDINARY_WAIT_MS = 50;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;
// After so long without an event the connection may be dead without an error, for example after a laptop slept.
const SILENCE_MS = 45_000;
// Switching tabs briefly does not close the stream.
const UNSEEN_MS = 5000;
const UNSEEN_PERIOD_MS = 30_000;

let source: AbortController | null = null;
let timer = 0;
let unseenTimer = 0;
let waitMs = FIRST_WAIT_MS;
let session = "";
let heardAt = 0;
let isFirstRetry = false;

/** Set the clock offset from the time in an answer that just arrived. */
export function takeServerTime(atUnixS: number): void {
  clockOffset.value = atUnixS - Date.now() / 1000;
}

function isLiveDocument(value: unknown): value is LiveDocument {
  const message = value as Partial<LiveDocument> | null;
  return typeof message === "object" && message !== null && typeof message.session === "string" && typeof message.versions === "object";
}

function take(text: string): void {
  let message: unknown;
  try {
    message = JSON.parse(text);
  } catch {
    return;
  }
  if (!isLiveDocument(message)) {
    return;
  }
  heardAt = Date.now();
  isFirstRetry = false;
  waitMs = FIRST_WAIT_MS;
  takeServerTime(message.at_unix_s);
  const isAnother = session !== "" && session !== message.session;
  const wasBroken = brokenSince.peek() !== null;
  session = message.session;
  if (isAnother) {
    forgetAnswers();
  }
  if (isAnother || wasBroken) {
    epoch.value += 1;
  }
  brokenSince.value = null;
  connection.value = "live";
  newestStep.value = message.step;
  versions.value = message.versions;
}

function close(): void {
  window.clearTimeout(timer);
  source?.abort();
  source = null;
}

function retry(): void {
  close();
  // The server ends each stream after a while. The first reconnection is immediate and is not shown to the user.
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
  // Jitter, so that not all pages reconnect at the same moment.
  timer = window.setTimeout(open, waitMs * (0.75 + Math.random() / 2));
  waitMs = Math.min(waitMs * 2, LONGEST_WAIT_MS);
}

function open(): void {
  close();
  if (isSignedOut.peek()) {
    return;
  }
  const opened = new AbortController();
  source = opened;
  const takeChange = (name: string, data: string): void => {
    if (name === "change" && source === opened) {
      take(data);
    }
  };
  const onEnd = (): void => {
    if (source === opened) {
      retry();
    }
  };
  void readEvents("live", takeChange, opened.signal).then(onEnd, onEnd);
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

function reopenIfNeeded(): void {
  if (isUnseen()) {
    return;
  }
  // the stream was closed while the page was hidden, or in the browser's back-forward cache
  const isGone = source === null && connection.peek() !== "reconnecting";
  const isQuiet = Date.now() - heardAt > SILENCE_MS;
  if (isGone || isQuiet || connection.peek() === "reconnecting") {
    waitMs = FIRST_WAIT_MS;
    open();
  }
}

/** Open the stream. A recorded job never changes, so no stream is opened for it. */
export function startLive(isRecorded: boolean): void {
  if (isRecorded) {
    connection.value = "recorded";
    return;
  }
  heardAt = Date.now();
  document.addEventListener("visibilitychange", reopenIfNeeded);
  window.addEventListener("online", reopenIfNeeded);
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", reopenIfNeeded);
  effect(() => {
    if (isSignedOut.value) {
      close();
    } else {
      open();
    }
  });
  isUnseen(); // a page may be opened in the background
}
