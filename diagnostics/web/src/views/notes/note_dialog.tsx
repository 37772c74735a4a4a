// Dialogs that add and retract a note. The audit records both. Notes are never edited or deleted.

import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";

import { asApiError, send } from "../../api/client";
import type { NoteDocument, NoteRequest, RetractionRequest } from "../../api/documents";
import { clock } from "../../app/preferences";
import { boundOf } from "../../ui/bounds";
import { Dialog } from "../../ui/dialog";
import { newKey } from "../actions/keys";

const LEAST_TEXT = 3;
const MOST_TEXT = 500;

interface TextProps {
  title: string;
  label: string;
  verb: string;
  /** Content below the text field. */
  children?: JSX.Element;
  /** Send the text; returns the error, empty on success. */
  write: (text: string, key: string) => Promise<string>;
  onClose: (isDone: boolean) => void;
}

function TextDialog({ title, label, verb, children, write, onClose }: TextProps): JSX.Element {
  const [text, setText] = useState("");
  const [problem, setProblem] = useState("");
  const [isSending, setIsSending] = useState(false);
  const key = useRef(newKey());
  const canSend = text.trim().length >= LEAST_TEXT && !isSending;
  const take = async (): Promise<void> => {
    setIsSending(true);
    const found = await write(text.trim(), key.current);
    setIsSending(false);
    setProblem(found);
    if (found === "") {
      onClose(true);
    }
  };
  return (
    <Dialog title={title} onClose={() => onClose(false)}>
      <form
        class="stack tight"
        onSubmit={(event) => {
          event.preventDefault();
          if (canSend) {
            void take();
          }
        }}
      >
        <label class="field">
          <span>{label}</span>
          <textarea
            rows={2}
            maxLength={MOST_TEXT}
            required
            autoFocus
            value={text}
            onInput={(event) => setText(event.currentTarget.value.replace(/\s*\n\s*/g, " "))}
          />
        </label>
        {children}
        {problem === "" ? null : (
          <p class="tone-text-bad" role="alert">
            {problem}
          </p>
        )}
        <div class="dialog-buttons">
          <button type="button" class="button" onClick={() => onClose(false)}>
            Cancel
          </button>
          <button type="submit" class="button primary" disabled={!canSend}>
            {verb}
          </button>
        </div>
      </form>
    </Dialog>
  );
}

async function posted(path: string, body: NoteRequest | RetractionRequest): Promise<string> {
  try {
    await send<NoteDocument>("POST", path, body);
    return "";
  } catch (error) {
    return asApiError(error).message;
  }
}

export function NoteDialog({ onClose }: { onClose: (isDone: boolean) => void }): JSX.Element {
  const [place, setPlace] = useState("");
  const write = async (text: string, key: string): Promise<string> => {
    const bound = boundOf(place, clock.value);
    if (bound === null || bound.startsWith("-")) {
      return `"${place}" is neither a step nor a time; write 1200, or 2026-11-23 09:30`;
    }
    const isStep = /^\d+$/.test(bound);
    const at = bound === "" || isStep ? null : Date.parse(bound) / 1000;
    return posted("notes", { text, step: isStep ? Number(bound) : null, at_unix_s: at, idempotency_key: key });
  };
  return (
    <TextDialog title="Add a note" label="What happened? All viewers can read this." verb="Add" write={write} onClose={onClose}>
      <label class="field">
        <span>Where: a step, or a time ({clock.value === "utc" ? "UTC" : "local time"})</span>
        <input type="text" value={place} placeholder="empty: now" autocomplete="off" onInput={(event) => setPlace(event.currentTarget.value)} />
      </label>
    </TextDialog>
  );
}

export function RetractionDialog({ note, onClose }: { note: NoteDocument; onClose: (isDone: boolean) => void }): JSX.Element {
  const write = (text: string, key: string): Promise<string> =>
    posted(`notes/${note.note_id}/retraction`, { reason: text, idempotency_key: key });
  return (
    <TextDialog title="Retract a note" label={`Why is it wrong? "${note.text}"`} verb="Retract" write={write} onClose={onClose}>
      <p class="soft">The note is removed from charts and incidents, and stays in the audit.</p>
    </TextDialog>
  );
}
