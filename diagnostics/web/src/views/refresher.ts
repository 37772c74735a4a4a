// Asks for a picture again when there is news of it: never twice at a time, not too often, and only while anybody looks.
// A request that is on its way is never given up for newer news: on a slow line nothing would ever come. The old picture
// stays until the new one has come, so nothing flickers.

import { useEffect, useRef, useState } from "preact/hooks";

import { asApiError, type ApiError } from "../api/client";
import { epoch, versions } from "../api/live";
import { rangeMoves } from "../app/range";

export interface Refreshed<T> {
  picture: T | null;
  error: ApiError | null;
  reload: () => void;
}

/** Asks once for a picture; `before` is the one that it returned last, null at first. */
export type ReadPicture<T> = (before: T | null, stop: AbortSignal) => Promise<T>;

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

/**
 * Return a picture that is asked for anew by every other question, for which `key` stands, and again whenever there is news
 * of `topic`. `begin` is called once a question: what it returns asks.
 */
export function useRefreshed<T>(topic: string, key: string, leastPauseMs: number, begin: () => ReadPicture<T>): Refreshed<T> {
  const version = versions.value[topic] ?? 0;
  const moves = rangeMoves.value;
  const era = epoch.value;
  const [held, setHeld] = useState<{ key: string; picture: T | null; error: ApiError | null }>({
    key: "", picture: null, error: null,
  });
  const [round, setRound] = useState(0);
  const refresher = useRef<Refresher | null>(null);
  useEffect(() => {
    const readPicture = begin();
    let shown: T | null = null;
    const read = async (stop: AbortSignal): Promise<void> => {
      try {
        shown = await readPicture(shown, stop);
        setHeld({ key, picture: shown, error: null });
      } catch (error) {
        if (!stop.aborted) {
          setHeld((before) => ({ key, picture: before.key === key ? before.picture : null, error: asApiError(error) }));
        }
      }
    };
    const own = new Refresher(read, leastPauseMs);
    refresher.current = own;
    own.start();
    return () => own.stop();
  }, [key, era, round]);
  const isFirst = useRef(true);
  useEffect(() => {
    if (!isFirst.current) {
      refresher.current?.news();
    }
    isFirst.current = false;
  }, [version, moves]);
  return { picture: held.picture, error: held.error, reload: () => setRound((old) => old + 1) };
}
