// Reads a picture again when the server reports a change: one request at a time, with a minimum pause, and only while the page
// is visible. A running request is never aborted for a newer change, or a slow connection would never get a picture. The old
// picture stays until the new one arrives, so nothing flickers.

import { useEffect, useRef, useState } from "preact/hooks";

import { asApiError, type ApiError } from "../api/client";
import { epoch, versions } from "../api/live";
import { rangeMoves } from "../app/range";

export interface Refreshed<T> {
  picture: T | null;
  error: ApiError | null;
  reload: () => void;
}

/** Reads a picture once; `before` is its previous result, null at first. */
export type ReadPicture<T> = (before: T | null, stop: AbortSignal) => Promise<T>;

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
    document.addEventListener("visibilitychange", this.look);
  }

  /** Read now. */
  start(): void {
    void this.readOnce();
  }

  /** Read again as soon as allowed. */
  changed(): void {
    this.isStale = true;
    this.look();
  }

  /** Stop reading; a running request is aborted. */
  stop(): void {
    this.stopper.abort();
    window.clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.look);
  }

  private readonly look = (): void => {
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
    this.look();
  }
}

/**
 * Return a picture that is read again whenever `key`, which identifies the query, or the version of `topic` changes. `begin` is
 * called once per query and returns the function that reads.
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
      refresher.current?.changed();
    }
    isFirst.current = false;
  }, [version, moves]);
  return { picture: held.picture, error: held.error, reload: () => setRound((old) => old + 1) };
}
