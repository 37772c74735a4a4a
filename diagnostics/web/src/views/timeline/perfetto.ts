// "Open in Perfetto": a window of the site's own Perfetto is opened and, once it answers, given the trace.
// Perfetto is told by its protocol: it answers "PONG" to "PING", and takes {perfetto: {buffer, title}}.

const PING_MS = 100;
const PATIENCE_MS = 20_000;

/** Open a trace. Resolves when it was handed over; throws an Error with a sentence where it could not be. */
export async function openInPerfetto(perfettoUrl: string, traceUrl: string, title: string): Promise<void> {
  const origin = new URL(perfettoUrl, window.location.href).origin;
  const opened = window.open(perfettoUrl, "_blank");
  if (opened === null) {
    throw new Error("The browser did not open a window: allow this page to open windows, or download the trace.");
  }
  const trace = fetch(traceUrl, { credentials: "same-origin" }).then((answer) => {
    if (!answer.ok) {
      throw new Error(`The trace could not be read (status ${answer.status}).`);
    }
    return answer.arrayBuffer();
  });
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
        reject(new Error(`Perfetto at ${origin} does not answer: is the address right? The trace can be downloaded.`));
        return;
      }
      opened.postMessage("PING", origin);
    }, PING_MS);
    window.addEventListener("message", listen);
  });
}
