// Asks for a picture again when there is news of it: never twice at a time, not too often, and only while anybody looks.
// A request that is on its way is never given up for newer news: on a slow line nothing would ever come.

export class Refresher {
  private readonly read: (stop: AbortSignal) => Promise<void>;
  private readonly leastPauseMs: number;
  private readonly stopper = new AbortController();
  private timer = 0;
  private endedAt = 0;
  private isBusy = false;
  private hasNews = false;

  /** `read` asks once; it must not throw. */
  constructor(read: (stop: AbortSignal) => Promise<void>, leastPauseMs: number) {
    this.read = read;
    this.leastPauseMs = leastPauseMs;
    document.addEventListener("visibilitychange", this.look);
  }

  /** Ask now. */
  start(): void {
    void this.ask();
  }

  /** Ask again as soon as may be. */
  news(): void {
    this.hasNews = true;
    this.look();
  }

  /** Ask nothing more; what is on its way is given up. */
  stop(): void {
    this.stopper.abort();
    window.clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.look);
  }

  private readonly look = (): void => {
    const isDue = this.hasNews && !this.isBusy && this.timer === 0 && !this.stopper.signal.aborted;
    if (isDue && document.visibilityState === "visible") {
      const pause = Math.max(0, this.endedAt + this.leastPauseMs - Date.now());
      this.timer = window.setTimeout(() => {
        this.timer = 0;
        void this.ask();
      }, pause);
    }
  };

  private async ask(): Promise<void> {
    this.isBusy = true;
    this.hasNews = false;
    await this.read(this.stopper.signal);
    this.isBusy = false;
    this.endedAt = Date.now();
    this.look();
  }
}
