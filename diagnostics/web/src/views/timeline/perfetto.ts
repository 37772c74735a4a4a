// "Open in Perfetto": opens a window of the configured Perfetto and sends it the trace once it answers. Perfetto's protocol:
// it answers "PONG" to "PING", and accepts {perfetto: {buffer, title}}.

import { request } from "../../api/client";

const PING_MS = 100;
const PATIENCE_MS = 20_000;

/** Open a trace. Resolves when it has been sent; throws an Error with a readable message on failure. */
export async function openInPerfetto(perfettoUrl: string, traceUrl: string, title: string): Promise<void> {
  const origin = new URL(perfettoUrl, window.location.href).origin;
  const opened = window.open(perfettoUrl, "_blank");
  if (opened === null) {
    throw new Error("The browser blocked the new window. Allow pop-ups for this page, or download the trace.");
  }
  const trace = request(traceUrl, {}).then((answer) => answer.arrayBuffer());
  await Promise.all([answered(opened, origin), trace]);
  opened.postMessage({ perfetto: { buffer: await trace, title, keepApiOpen: false } }, origin);
}

function answered(opened: Window, origin: string): Promise<void> {
  return new Promise((resolve, reject) => {
    const began = Date.now();
    const finish = (): void => {
      window.clearInterval(timer);
      window.removeEventListener("message", listen);
    };
    const listen = (event: MessageEvent): void => {
      if (event.origin === origin && event.source === opened && event.data === "PONG") {
        finish();
        resolve();
      }
    };
    const timer = window.setInterval(() => {
      if (Date.now() - began > PATIENCE_MS || opened.closed) {
        finish();
        reject(new Error(`Perfetto at ${origin} does not answer. Check [dashboard] perfetto_url, or download the trace.`));
        return;
      }
      opened.postMessage("PING", origin);
    }, PING_MS);
    window.addEventListener("message", listen);
  });
}
