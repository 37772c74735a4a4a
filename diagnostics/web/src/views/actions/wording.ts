// The texts of each action: the button's label and the effect.

import type { ActionRequest, HostDocument } from "../../api/documents";

export type Kind = ActionRequest["kind"];

export interface Wording {
  label: string;
  /** The effect, shown before the request is sent. */
  effect: string;
  isDangerous: boolean;
  /** What `target` is. */
  target: "none" | "host" | "verdict";
}

export const WORDINGS: Record<Kind, Wording> = {
  "checkpoint": {
    label: "Checkpoint now",
    effect: "All ranks save a checkpoint at a common next step. Training continues.",
    isDangerous: false,
    target: "none",
  },
  "restart": {
    label: "Restart",
    effect: "The job saves, all workers stop, and a new round resumes from the newest step that every rank has.",
    isDangerous: true,
    target: "none",
  },
  "stop": {
    label: "Stop",
    effect: "The job saves and stops. It resumes only when it is launched again.",
    isDangerous: true,
    target: "none",
  },
  "evict": {
    label: "Evict",
    effect: "The host leaves the running round and is cordoned. A spare replaces it, or the job continues with fewer hosts.",
    isDangerous: true,
    target: "host",
  },
  "cordon": {
    label: "Cordon",
    effect: "No later round uses this host until the cordon is removed. The running round is not affected.",
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
    effect:
      "The driver executes the verdict, within its limits: the job restarts without the named hosts, or goes back to " +
      "an earlier checkpoint, or stops.",
    isDangerous: true,
    target: "verdict",
  },
  "dismiss": {
    label: "Dismiss",
    effect: "The verdict is closed without any action.",
    isDangerous: false,
    target: "verdict",
  },
  "diag-on": {
    label: "Recording on",
    effect: "Ranks time all operations. One step in diagnostics.sample_period is recorded span by span; of the others only the totals are recorded.",
    isDangerous: false,
    target: "none",
  },
  "diag-off": {
    label: "Recording off",
    effect: "Ranks time no operations until recording is switched on again, so no stragglers are detected. Progress and hangs are still detected.",
    isDangerous: true,
    target: "none",
  },
};

/** The actions for a host: only a host in the round can be evicted. */
export function hostKinds(host: HostDocument): readonly Kind[] {
  const cordon: Kind = host.cordon_unix_s === null ? "cordon" : "uncordon";
  return host.first_rank === null ? [cordon] : ["evict", cordon];
}
