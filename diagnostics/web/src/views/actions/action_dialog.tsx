// The dialog that requests an action: its effect, the reason, the typed name of the job, an optional dry run, and the result.

import type { JSX } from "preact";
import { useId, useRef, useState } from "preact/hooks";

import { ApiError, asApiError, send } from "../../api/client";
import type { ActionAnswer, ActionRequest } from "../../api/documents";
import { job } from "../../app/job";
import { hrefOf } from "../../app/location";
import { Badge } from "../../ui/badge";
import { Dialog } from "../../ui/dialog";
import { newKey } from "./keys";
import { WORDINGS, type Kind } from "./wording";

const LEAST_REASON = 3;
const MOST_REASON = 500;

interface ActionDialogProps {
  kind: Kind;
  target: string;
  onClose: () => void;
}

type Outcome = { answer: ActionAnswer } | { error: ApiError };

async function sendRequest(request: ActionRequest): Promise<Outcome> {
  try {
    const answer = await send<ActionAnswer>("POST", "actions", request);
    return answer === null ? { error: new ApiError(0, "unavailable", "The server sent an empty answer.") } : { answer };
  } catch (error) {
    return { error: asApiError(error) };
  }
}

function OutcomeLine({ outcome }: { outcome: Outcome }): JSX.Element {
  if ("error" in outcome) {
    return (
      <p class="outcome" role="alert">
        <Badge tone="bad" shape="octagon">
          {outcome.error.status === 0 ? "no answer" : "refused"}
        </Badge>{" "}
        {outcome.error.message}
      </p>
    );
  }
  const { answer } = outcome;
  const tone = !answer.is_accepted ? "bad" : answer.is_dry_run ? "accent" : "good";
  const word = !answer.is_accepted ? "not accepted" : answer.is_dry_run ? "dry run" : answer.is_done ? "done" : "accepted";
  return (
    <p class="outcome" role="status" data-outcome={word}>
      <Badge tone={tone} shape={answer.is_accepted ? "circle" : "octagon"}>
        {word}
      </Badge>{" "}
      {answer.text}{" "}
      {answer.is_dry_run ? null : <a href={hrefOf("audit")}>audit</a>}
    </p>
  );
}

export function ActionDialog({ kind, target, onClose }: ActionDialogProps): JSX.Element {
  const [reason, setReason] = useState("");
  const [confirmation, setConfirmation] = useState("");
  const [outcome, setOutcome] = useState<Outcome | null>(null);
  const [isSending, setIsSending] = useState(false);
  const requestKey = useRef(newKey());
  const hint = useId();
  const name = job.value?.job ?? "";
  const wording = WORDINGS[kind];
  const hasReason = reason.trim().length >= LEAST_REASON;
  const isConfirmed = confirmation === name;
  const isOver = outcome !== null && "answer" in outcome && !outcome.answer.is_dry_run && outcome.answer.is_accepted;

  const carryOut = async (isDryRun: boolean): Promise<void> => {
    setIsSending(true);
    // a dry run needs a key of its own, or the server would answer the real request with the dry run's result
    const key = isDryRun ? newKey() : requestKey.current;
    const request = { kind, target, reason: reason.trim(), confirmation, is_dry_run: isDryRun, idempotency_key: key };
    setOutcome(await sendRequest(request));
    setIsSending(false);
  };

  return (
    <Dialog title={target === "" ? wording.label : `${wording.label}: ${target}`} onClose={onClose}>
      <form
        class="stack tight"
        onSubmit={(event) => {
          event.preventDefault();
          if (hasReason && isConfirmed && !isSending && !isOver) {
            void carryOut(true);
          }
        }}
      >
        <p>{wording.effect}</p>
        <label class="field">
          <span>Why? The reason is recorded in the audit.</span>
          <textarea
            rows={2}
            maxLength={MOST_REASON}
            required
            autoFocus
            value={reason}
            onInput={(event) => setReason(event.currentTarget.value)}
          />
        </label>
        <label class="field">
          <span>
            Type the name of the job, <strong>{name}</strong>
          </span>
          <input
            type="text"
            autocomplete="off"
            spellcheck={false}
            aria-describedby={hint}
            value={confirmation}
            onInput={(event) => setConfirmation(event.currentTarget.value)}
          />
          <span class="hint" id={hint}>
            {confirmation !== "" && !isConfirmed ? "This is not the name of the job." : "Required for the dry run too, which checks everything."}
          </span>
        </label>
        {outcome === null ? null : <OutcomeLine outcome={outcome} />}
        <div class="dialog-buttons">
          <button type="button" class="button" onClick={onClose}>
            {isOver ? "Close" : "Cancel"}
          </button>
          <button type="submit" class="button" disabled={!hasReason || !isConfirmed || isSending || isOver}>
            Dry run
          </button>
          <button
            type="button"
            class={wording.isDangerous ? "button danger" : "button primary"}
            disabled={!hasReason || !isConfirmed || isSending || isOver}
            data-carry-out=""
            onClick={() => void carryOut(false)}
          >
            {wording.label}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
