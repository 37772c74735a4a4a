// The state of a host as shape and word.

import type { JSX } from "preact";

import type { HostDocument } from "../../api/documents";
import { Badge, type Tone } from "../../ui/badge";
import type { Shape } from "../../ui/icons";

const WORKING = new Set(["running", "starting", "spare", "done", "drives"]);

const MEANINGS: Record<string, string> = {
  running: "its ranks train",
  starting: "its workers start",
  stopping: "its workers save or stop",
  stopped: "its workers have stopped; the next round decides what it does",
  parked: "fit, and in no round",
  done: "its workers have done all steps",
  failed: "its workers ended with a failure",
  spare: "fit, and takes the place of a host that fails",
  waiting: "fit, and there is no round yet",
  unfit: "its checks failed: it gets no ranks",
  cordoned: "kept out of the job until somebody lets it in again",
  lost: "in the round, and nothing is heard of it: its lease is gone",
  returned: "its executor began anew; only the next round can take it",
  silent: "in the round, and has not told yet how it is",
  gone: "not there any more",
  drives: "it has no ranks: the driver runs on it",
  recorded: "it was in this run, whose history this is",
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
