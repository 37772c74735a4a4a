// Notes of users on the run, and changes of its configuration, which may explain changes in the charts.

import "./notes.css";

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { useResource, type Resource } from "../../api/resource";
import type { ChangedKeyDocument, ConfigChangeDocument, MarksDocument, NoteDocument, NotesDocument } from "../../api/documents";
import { hrefOf, useParam } from "../../app/location";
import { isWholeRun, rangeQuery } from "../../app/range";
import { TimeText } from "../../ui/figures";
import { countOf, countText, sentence } from "../../ui/format";
import { Section, ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";
import { NoteDialog, RetractionDialog } from "./note_dialog";

function Place({ note }: { note: NoteDocument }): JSX.Element {
  return note.step === null ? <TimeText at={note.at_unix_s} /> : <span>step {countText(note.step)}</span>;
}

function columnsOf(canWrite: boolean, retract: (note: NoteDocument) => void): readonly Column<NoteDocument>[] {
  return [
    { key: "place", label: "Step or time", render: (row) => <Place note={row} /> },
    {
      key: "text",
      label: "Note",
      className: "wide",
      render: (row) =>
        row.retracted_unix_s === null ? (
          row.text
        ) : (
          <>
            <s class="faint">{row.text}</s> <span class="soft">retracted by {row.retracted_by}: {row.retraction}</span>
          </>
        ),
    },
    { key: "user", label: "By", sort: (row) => row.user, render: (row) => row.user },
    { key: "written", label: "Written", sort: (row) => row.written_unix_s, render: (row) => <TimeText at={row.written_unix_s} /> },
    {
      key: "incidents",
      label: "Incident",
      render: (row) =>
        row.incident_ids.map((id) => (
          <a key={id} href={hrefOf(["incidents", id])}>
            {id}{" "}
          </a>
        )),
    },
    ...(canWrite
      ? [
          {
            key: "act",
            label: "",
            render: (row: NoteDocument) =>
              row.retracted_unix_s === null ? (
                <button type="button" class="button small quiet" onClick={() => retract(row)}>
                  Retract
                </button>
              ) : null,
          },
        ]
      : []),
  ];
}

function Notes({ resource }: { resource: Resource<NotesDocument> }): JSX.Element {
  const [chosen] = useParam("note", "");
  const [retracted, setRetracted] = useState<NoteDocument | null>(null);
  return (
    <>
      <Loaded resource={resource}>
        {(document) =>
          document.notes.length === 0 ? (
            <EmptyState title={isWholeRun.value ? "No note yet" : "No note in this range"}>
              A note records events that the system does not see, such as a replaced switch. Notes are shown on charts, at incidents
              of that time, and in exports. <code>megatrain annotate</code> adds notes too.
            </EmptyState>
          ) : (
            <Table
              caption="Notes"
              columns={columnsOf(document.can_write, setRetracted)}
              rows={document.notes}
              rowKey={(row) => row.note_id}
              isChosen={(row) => row.note_id === chosen}
              defaultSort="-written"
            />
          )
        }
      </Loaded>
      {retracted === null ? null : (
        <RetractionDialog
          note={retracted}
          onClose={(isDone) => {
            setRetracted(null);
            if (isDone) {
              resource.reload();
            }
          }}
        />
      )}
    </>
  );
}

const KEY_COLUMNS: readonly Column<ChangedKeyDocument>[] = [
  { key: "key", label: "Key", render: (row) => <code>{row.key}</code> },
  { key: "before", label: "Before", render: (row) => <code>{row.before === "" ? "\u2013" : row.before}</code> },
  { key: "after", label: "After", className: "wide", render: (row) => <code>{row.after === "" ? "\u2013" : row.after}</code> },
];

function Change({ change, isOpen }: { change: ConfigChangeDocument; isOpen: boolean }): JSX.Element {
  return (
    <details class="config-change" open={isOpen}>
      <summary>
        Round {countText(change.round)}, from step {countText(change.first_step)}: {countOf(change.keys.length, "key")} changed,{" "}
        <TimeText at={change.at_unix_s} />
      </summary>
      <Table caption={`Configuration of round ${change.round}`} columns={KEY_COLUMNS} rows={change.keys} rowKey={(row) => row.key} />
    </details>
  );
}

export function NotesView(): JSX.Element {
  const [change] = useParam("change", "");
  const [isWriting, setIsWriting] = useState(false);
  const notes = useResource<NotesDocument>("notes", rangeQuery(), "incidents");
  const marks = useResource<MarksDocument>("marks", rangeQuery(), "incidents");
  return (
    <>
      <ViewHead title="Notes" note={notes.data === null ? undefined : countOf(notes.data.notes.length, "note")}>
        {notes.data === null ? null : notes.data.can_write ? (
          <button type="button" class="button" onClick={() => setIsWriting(true)}>
            Add a note
          </button>
        ) : (
          <span class="section-note">{sentence(notes.data.why_not_write)}</span>
        )}
      </ViewHead>
      <Notes resource={notes} />
      <Section title="Changes of the configuration" note="rounds whose configuration differs from the previous round's">
        <Loaded resource={marks} lines={2}>
          {(document) =>
            document.changes.length === 0 ? (
              <p class="soft">None{isWholeRun.value ? "" : " in this range"}.</p>
            ) : (
              <>
                {[...document.changes].reverse().map((one) => (
                  <Change key={`${one.round} ${one.at_unix_s}`} change={one} isOpen={String(one.round) === change} />
                ))}
              </>
            )
          }
        </Loaded>
      </Section>
      {isWriting ? (
        <NoteDialog
          onClose={(isDone) => {
            setIsWriting(false);
            if (isDone) {
              notes.reload();
            }
          }}
        />
      ) : null}
    </>
  );
}
