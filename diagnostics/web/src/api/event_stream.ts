// A stream of server-sent events, read with fetch: EventSource sends no headers, and the page secret travels in one.

import { apiUrl, request } from "./client";
import { parseEvent } from "./event_text";

/** Call `take` with the name and the data of each event, until the stream ends. Throws ApiError, or AbortError after signalToStop. */
export async function readEvents(
  path: string,
  take: (name: string, data: string) => void,
  signalToStop: AbortSignal,
): Promise<void> {
  const response = await request(apiUrl(path), { headers: { Accept: "text/event-stream" }, signal: signalToStop });
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  while (reader !== undefined) {
    const { done, value } = await reader.read();
    if (done) {
      return;
    }
    const blocks = (pending + value).split("\n\n");
    pending = blocks.pop() ?? "";
    for (const block of blocks) {
      const { name, data } = parseEvent(block);
      if (data !== "") {
        take(name, data);
      }
    }
  }
}
