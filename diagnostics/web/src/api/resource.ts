// A document that a view shows. It is read when the view opens, when the query changes and when the server reports a new
// version. The previous answer stays on the page until the next one arrives, so nothing flickers.

import { useEffect, useRef, useState } from "preact/hooks";

import { asApiError, getJson, type ApiError, type Query } from "./client";
import { rangeMoves } from "../app/range";
import { epoch, versions } from "./live";

export interface Resource<T> {
  /** The last answer from this path for this round; while `isPending` it may belong to other parameters. */
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
 * Return the API's answer. `topic` is a name in LiveDocument.versions; without one the document is read once.
 * With a null path nothing is requested.
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
  const requestedAt = useRef(0);
  const requestedKey = useRef("");

  useEffect(() => {
    if (path === null) {
      return undefined;
    }
    const stop = new AbortController();
    const read = async (): Promise<void> => {
      requestedAt.current = Date.now();
      requestedKey.current = key;
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
    // A reload of the same query waits for a minimum pause and until the page is visible; a new query is sent at once.
    const isSame = requestedKey.current === key;
    const pause = isSame ? Math.max(0, LEAST_PAUSE_MS - (Date.now() - requestedAt.current)) : 0;
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
    // the key contains path and query
  }, [key, version, moves, era, attempt]);

  // An answer for another round is never returned as one for this round.
  const isOfThis = held.path === path && held.round === about;
  return {
    data: isOfThis ? held.data : null,
    error: isOfThis ? held.error : null,
    isPending: held.isPending || !isOfThis,
    reload: () => setAttempt((old) => old + 1),
  };
}
