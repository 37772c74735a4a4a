// What each action is, in words: the button, what it does, what it costs.

import type { ActionRequest, HostDocument } from "../../api/documents";

export type Kind = ActionRequest["kind"];

export interface Wording {
  label: string;
  /** What happens, said before it is asked for. */
  effect: string;
  isDangerous: boolean;
  /** What `target` is. */
  target: "none" | "host" | "verdict";
}

export const WORDINGS: Record<Kind, Wording> = {
  "checkpoint": {
    label: "Checkpoint now",
    effect: "All ranks save at the next step that they agree on. Training goes on.",
    isDangerous: false,
    target: "none",
  },
  "restart": {
    label: "Restart",
    effect: "The job saves, all workers end, and a new round begins from the newest step that every rank has.",
    isDangerous: true,
    target: "none",
  },
  "stop": {
    label: "Stop",
    effect: "The job saves and stops. It goes on only when somebody launches it again.",
    isDangerous: true,
    target: "none",
  },
  "evict": {
    label: "Evict",
    effect: "The host leaves the running round and is cordoned; a spare takes its place, or the job goes on with fewer hosts.",
    isDangerous: true,
    target: "host",
  },
  "cordon": {
    label: "Cordon",
    effect: "No later round uses this host until the cordon is taken away. The running round is not touched.",
    isDangerous: false,
    target: "host",
  },
  "uncordon": {
    label: "Uncordon",
    effect: "Rounds may use this host again.",
    isDangerous: false,
    target: "host",
  },
  "approve": {
    label: "Approve",
    effect: "The driver does what the verdict proposes: the hosts that it names are evicted and the job restarts without them.",
    isDangerous: true,
    target: "verdict",
  },
  "dismiss": {
    label: "Dismiss",
    effect: "The verdict is put aside; nothing is done about it.",
    isDangerous: false,
    target: "verdict",
  },
  "diag-on": {
    label: "Recording on",
    effect: "Ranks time all operations; one step in diagnostics.sample_period is recorded span by span, of the others the sums.",
    isDangerous: false,
    target: "none",
  },
  "diag-off": {
    label: "Recording off",
    effect: "Ranks time nothing until it is switched on again: no stragglers are found. Progress is still seen, and hangs are still found.",
    isDangerous: true,
    target: "none",
  },
};

/** What can be asked for about a host: only who is in the round can leave it. */
export function hostKinds(host: HostDocument): readonly Kind[] {
  const cordon: Kind = host.cordon_unix_s === null ? "cordon" : "uncordon";
  return host.first_rank === null ? [cordon] : ["evict", cordon];
}
