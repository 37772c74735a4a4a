// A document that a view shows: asked for when the view opens, when the question changes and when the server says that it
// has news. The last answer stays on the page while the next one is on its way, so nothing flickers.

import { useEffect, useRef, useState } from "preact/hooks";

import { asApiError, getJson, type ApiError, type Query } from "./client";
import { rangeMoves } from "../app/range";
import { epoch, versions } from "./live";

export interface Resource<T> {
  /** The last answer from this path about this round; while `isPending` it may be to other parameters. */
  data: T | null;
  error: ApiError | null;
  isPending: boolean;
  reload: () => void;
}

interface Held<T> {
  path: string | null;
  round: Query[string];
  key: string;
  data: T | null;
  error: ApiError | null;
  isPending: boolean;
}

const LEAST_PAUSE_MS = 900;

/**
 * Return what the API answers. `topic` is the name in LiveDocument.versions; without one the document is asked for once.
 * A null path asks nothing.
 */
export function useResource<T>(path: string | null, query: Query = {}, topic?: string): Resource<T> {
  const key = path === null ? "" : `${path} ${JSON.stringify(query)}`;
  const version = topic === undefined ? 0 : (versions.value[topic] ?? 0);
  const moves = topic === undefined || !query["from"] ? 0 : rangeMoves.value;
  const era = epoch.value;
  const about = query["round"];
  const [held, setHeld] = useState<Held<T>>({
    path,
    round: about,
    key: "",
    data: null,
    error: null,
    isPending: path !== null,
  });
  const [attempt, setAttempt] = useState(0);
  const askedAt = useRef(0);
  const askedKey = useRef("");

  useEffect(() => {
    if (path === null) {
      return undefined;
    }
    const stop = new AbortController();
    const read = async (): Promise<void> => {
      askedAt.current = Date.now();
      askedKey.current = key;
      setHeld((old) => ({ ...old, isPending: true }));
      try {
        const data = await getJson<T>(path, query, stop.signal);
        setHeld({ path, round: about, key, data, error: null, isPending: false });
      } catch (error) {
        if (!stop.signal.aborted) {
          const data = (old: Held<T>): T | null => (old.key === key ? old.data : null);
          setHeld((old) => ({ path, round: about, key, data: data(old), error: asApiError(error), isPending: false }));
        }
      }
    };
    // News of the same question may wait a moment, and until somebody looks; another question is asked at once.
    const isSame = askedKey.current === key;
    const pause = isSame ? Math.max(0, LEAST_PAUSE_MS - (Date.now() - askedAt.current)) : 0;
    let timer = 0;
    const begin = (): void => {
      if (document.visibilityState === "visible" || !isSame) {
        document.removeEventListener("visibilitychange", begin);
        timer = window.setTimeout(() => void read(), pause);
      }
    };
    document.addEventListener("visibilitychange", begin);
    begin();
    return () => {
      document.removeEventListener("visibilitychange", begin);
      window.clearTimeout(timer);
      stop.abort();
    };
    // the key stands for path and query
  }, [key, version, moves, era, attempt]);

  // What was said of another round must never be taken for what is said of this one.
  const isOfThis = held.path === path && held.round === about;
  return {
    data: isOfThis ? held.data : null,
    error: isOfThis ? held.error : null,
    isPending: held.isPending || !isOfThis,
    reload: () => setAttempt((old) => old + 1),
  };
}
