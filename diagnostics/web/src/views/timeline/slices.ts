// Reads slices and ideals when the query changes.

import { useEffect, useState } from "preact/hooks";

import { asApiError, getArrays, type ApiError, type Query } from "../../api/client";
import { epoch } from "../../api/live";
import { readArrays, type Arrays } from "../../canvas/arrays";

export interface Loaded<T> {
  data: T | null;
  error: ApiError | null;
  isPending: boolean;
}

/**
 * Return the answer of a path, decoded by `read`, while `isWanted`. Recorded steps do not change, so an answer is read again
 * only after the stream of events was broken.
 */
export function useArrays<T>(
  path: string, query: Query, read: (arrays: Arrays) => T, isWanted: boolean,
): Loaded<T> & { reload: () => void } {
  const key = isWanted ? `${path} ${JSON.stringify(query)}` : "";
  const [held, setHeld] = useState<{ key: string; data: T | null; error: ApiError | null }>({ key: "", data: null, error: null });
  const [round, setRound] = useState(0);
  const era = epoch.value;
  useEffect(() => {
    if (!isWanted) {
      return undefined;
    }
    const stop = new AbortController();
    getArrays(path, query, stop.signal).then(
      (buffer) => {
        try {
          setHeld({ key, data: read(readArrays(buffer)), error: null });
        } catch (error) {
          setHeld({ key, data: null, error: asApiError(error) });
        }
      },
      (error: unknown) => {
        if (!stop.signal.aborted) {
          setHeld({ key, data: null, error: asApiError(error) });
        }
      },
    );
    return () => stop.abort();
    // the key contains path and query
  }, [key, era, round]);
  const isMine = isWanted && held.key === key;
  return {
    data: isMine ? held.data : null,
    error: isMine ? held.error : null,
    isPending: isWanted && !isMine,
    reload: () => setRound((old) => old + 1),
  };
}
