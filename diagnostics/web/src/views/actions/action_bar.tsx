// Buttons for the actions that the user may request. A user who may not act sees "read-only" with the reason instead.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { job } from "../../app/job";
import { ActionDialog } from "./action_dialog";
import { WORDINGS, type Kind } from "./wording";

interface ActionBarProps {
  kinds: readonly Kind[];
  target: string;
  /** The view shows elsewhere why there are no buttons. */
  isQuiet?: boolean;
}

export function ActionBar({ kinds, target, isQuiet }: ActionBarProps): JSX.Element | null {
  const [open, setOpen] = useState<Kind | null>(null);
  const info = job.value;
  if (info === null) {
    return null;
  }
  if (!info.can_act) {
    return isQuiet === true ? null : (
      <span class="faint why-not" title={info.why_not_act}>
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
