// Reads a document again when the server reports a change: one request at a time, with a minimum pause, and only while the page
// is visible. A running request is never aborted for a newer change: if answers take longer than changes to come, none would
// arrive, and the server would go on computing all of them.

export class Refresher {
  private readonly read: (stop: AbortSignal) => Promise<void>;
  private readonly leastPauseMs: number;
  private readonly stopper = new AbortController();
  private timer = 0;
  private endedAt = 0;
  private isBusy = false;
  private isStale = false;

  /** `read` sends one request; it must not throw. */
  constructor(read: (stop: AbortSignal) => Promise<void>, leastPauseMs: number) {
    this.read = read;
    this.leastPauseMs = leastPauseMs;
    document.addEventListener("visibilitychange", this.readIfDue);
  }

  /** Read now. */
  start(): void {
    void this.readOnce();
  }

  /** Read again as soon as allowed. */
  changed(): void {
    this.isStale = true;
    this.readIfDue();
  }

  /** Stop reading; a running request is aborted. */
  stop(): void {
    this.stopper.abort();
    window.clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.readIfDue);
  }

  private readonly readIfDue = (): void => {
    const isDue = this.isStale && !this.isBusy && this.timer === 0 && !this.stopper.signal.aborted;
    if (isDue && document.visibilityState === "visible") {
      const pause = Math.max(0, this.endedAt + this.leastPauseMs - Date.now());
      this.timer = window.setTimeout(() => {
        this.timer = 0;
        void this.readOnce();
      }, pause);
    }
  };

  private async readOnce(): Promise<void> {
    this.isBusy = true;
    this.isStale = false;
    await this.read(this.stopper.signal);
    this.isBusy = false;
    this.endedAt = Date.now();
    this.readIfDue();
  }
}
