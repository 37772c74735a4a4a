// A document that a view shows. It is read when the view opens, when the query changes and when the server reports a new
// version. The previous answer stays on the page until the next one arrives, so nothing flickers.

import { useState } from "preact/hooks";

import { asApiError, getJson, type ApiError, type Query } from "./client";
import { rangeMoves } from "../app/range";
import { epoch, versions } from "./live";
import { useRefresher } from "./use_refresher";

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
 * Return the API's answer. `topic` is a name in LiveDocument.versions; without one, changed data is not read again.
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
  // the key contains path and query
  useRefresher(path === null ? null : `${era} ${attempt} ${key}`, `${version} ${moves}`, LEAST_PAUSE_MS, () => async (stop) => {
    setHeld((old) => ({ ...old, isPending: true }));
    try {
      const data = await getJson<T>(path ?? "", query, stop);
      setHeld({ path, round: about, key, data, error: null, isPending: false });
    } catch (error) {
      if (!stop.aborted) {
        const data = (old: Held<T>): T | null => (old.key === key ? old.data : null);
        setHeld((old) => ({ path, round: about, key, data: data(old), error: asApiError(error), isPending: false }));
      }
    }
  });

  // An answer for another round is never returned as one for this round.
  const isOfThis = held.path === path && held.round === about;
  return {
    data: isOfThis ? held.data : null,
    error: isOfThis ? held.error : null,
    isPending: held.isPending || !isOfThis,
    reload: () => setAttempt((old) => old + 1),
  };
}
