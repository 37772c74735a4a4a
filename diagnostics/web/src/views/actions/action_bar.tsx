// Buttons for what a person may ask for, where it belongs. Where nothing may be asked for there are none, and the reason.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { job } from "../../app/job";
import { ActionDialog } from "./action_dialog";
import { WORDINGS, type Kind } from "./wording";

interface ActionBarProps {
  kinds: readonly Kind[];
  target: string;
  /** The reason why there are no buttons is said elsewhere in the view. */
  isQuiet?: boolean;
}

export function ActionBar({ kinds, target, isQuiet }: ActionBarProps): JSX.Element | null {
  const [open, setOpen] = useState<Kind | null>(null);
  const told = job.value;
  if (told === null) {
    return null;
  }
  if (!told.can_act) {
    return isQuiet === true ? null : (
      <span class="faint why-not" title={told.why_not_act}>
        read-only
      </span>
    );
  }
  return (
    <span class="row">
      {kinds.map((kind) => (
        <button key={kind} type="button" class="button small" data-action={kind} onClick={() => setOpen(kind)}>
          {WORDINGS[kind].label}
        </button>
      ))}
      {open === null ? null : <ActionDialog kind={open} target={target} onClose={() => setOpen(null)} />}
    </span>
  );
}
