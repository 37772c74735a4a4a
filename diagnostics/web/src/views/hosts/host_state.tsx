// The state of a host as shape and word.

import type { JSX } from "preact";

import type { HostDocument } from "../../api/documents";
import { Badge, type Tone } from "../../ui/badge";
import type { Shape } from "../../ui/icons";

const WORKING = new Set(["running", "starting", "spare", "done", "drives"]);

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
    <Badge tone={tone} shape={shape}>
      {host.state}
    </Badge>
  );
}
