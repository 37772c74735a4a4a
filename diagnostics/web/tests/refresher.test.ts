// When documents are read again.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Refresher } from "../src/api/refresher.ts";

interface Request {
  stop: AbortSignal;
  answer: () => void;
}

/** A page whose timers run when the test says so. */
class Page {
  visibilityState = "visible";
  readonly requests: Request[] = [];
  private readonly listeners = new Set<() => void>();
  private readonly timers = new Map<number, () => void>();
  private next = 1;

  constructor() {
    Object.assign(globalThis, { document: this, window: this });
  }

  addEventListener = (_: string, listener: () => void): void => void this.listeners.add(listener);
  removeEventListener = (_: string, listener: () => void): void => void this.listeners.delete(listener);
  clearTimeout = (timer: number): void => void this.timers.delete(timer);
  setTimeout = (call: () => void): number => {
    this.timers.set(this.next, call);
    return this.next++;
  };

  turn(state: string): void {
    this.visibilityState = state;
    this.listeners.forEach((listener) => listener());
  }

  runTimers(): void {
    const due = [...this.timers.values()];
    this.timers.clear();
    due.forEach((call) => call());
  }

  read = (stop: AbortSignal): Promise<void> =>
    new Promise((resolve) => {
      this.requests.push({ stop, answer: resolve });
    });

  /** Answer the newest request, and let what follows from it happen. */
  async answer(): Promise<void> {
    this.requests.at(-1)?.answer();
    await new Promise((resolve) => setImmediate(resolve));
  }
}

test("changes during a request leave it alone and are read by one more", async () => {
  const page = new Page();
  const refresher = new Refresher(page.read, 900);
  refresher.start();
  for (let change = 0; change < 30; change++) {
    refresher.changed();
    page.runTimers();
  }
  assert.deepEqual(page.requests.map((each) => each.stop.aborted), [false]);

  await page.answer();
  page.runTimers();
  assert.equal(page.requests.length, 2);

  await page.answer();
  page.runTimers();
  assert.equal(page.requests.length, 2);
});

test("a page that is not visible reads again when it is", async () => {
  const page = new Page();
  const refresher = new Refresher(page.read, 900);
  refresher.start();
  await page.answer();
  page.turn("hidden");
  refresher.changed();
  page.runTimers();
  assert.equal(page.requests.length, 1);
  page.turn("visible");
  page.runTimers();
  assert.equal(page.requests.length, 2);
});

test("a stopped refresher aborts its request and reads no more", async () => {
  const page = new Page();
  const refresher = new Refresher(page.read, 900);
  refresher.start();
  refresher.changed();
  refresher.stop();
  assert.equal(page.requests[0]?.stop.aborted, true);
  await page.answer();
  page.runTimers();
  assert.equal(page.requests.length, 1);
});
