// The state of a host as shape and word.

import type { JSX } from "preact";

import type { HostDocument } from "../../api/documents";
import { Badge, type Tone } from "../../ui/badge";
import type { Shape } from "../../ui/icons";

const WORKING = new Set(["running", "starting", "spare", "done", "drives"]);

const MEANINGS: Record<string, string> = {
  running: "its ranks are training",
  starting: "its workers are starting",
  stopping: "its workers are saving or stopping",
  stopped: "its workers have stopped; the next round decides its role",
  parked: "fit, but not in a round",
  done: "its workers have completed all steps",
  failed: "its workers ended with a failure",
  spare: "fit, and ready to replace a failed host",
  waiting: "fit, but no round is running",
  unfit: "its checks failed, so it gets no ranks",
  cordoned: "excluded from rounds until the cordon is removed",
  lost: "in the round, but its lease has expired or the driver found it dead",
  returned: "its executor restarted; only the next round can include it",
  silent: "in the round, but has not reported its state yet",
  gone: "no longer present",
  drives: "runs the driver and has no ranks",
  recorded: "took part in this recorded run",
};

export function HostState({ host }: { host: HostDocument }): JSX.Element {
  let tone: Tone = "quiet";
  let shape: Shape = "ring";
  if (!host.is_in_order) {
    tone = host.cordon_unix_s === null ? "bad" : "warning";
    shape = host.cordon_unix_s === null ? "octagon" : "square";
  } else if (WORKING.has(host.state)) {
    tone = "good";
    shape = host.state === "spare" ? "ring" : "circle";
  }
  return (
    <Badge tone={tone} shape={shape} title={MEANINGS[host.state]}>
      {host.state}
    </Badge>
  );
}
