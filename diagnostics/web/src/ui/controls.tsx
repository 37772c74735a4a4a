// Small controls: radio group, select, text field, switch, copy and download buttons.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";

import { asApiError, download } from "../api/client";
import { flushLocation } from "../app/location";

export interface Option {
  value: string;
  label: string;
  title?: string;
}

interface ChoiceProps {
  label: string;
  options: readonly Option[];
  value: string;
  onChange: (value: string) => void;
}

/** A radio group with all options visible; arrow keys change the choice. */
export function Segmented({ label, options, value, onChange }: ChoiceProps): JSX.Element {
  const name = useId();
  return (
    <fieldset class="segmented">
      <legend class="visually-hidden">{label}</legend>
      {options.map((option) => (
        <label key={option.value} class={option.value === value ? "is-chosen" : ""} title={option.title}>
          <input
            type="radio"
            name={name}
            value={option.value}
            checked={option.value === value}
            onChange={() => onChange(option.value)}
          />
          {option.label}
        </label>
      ))}
    </fieldset>
  );
}

/** A drop-down list, for many options. */
export function Select({ label, options, value, onChange }: ChoiceProps): JSX.Element {
  const isKnown = options.some((option) => option.value === value);
  return (
    <label class="field inline">
      <span>{label}</span>
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {isKnown ? null : <option value={value}>{value === "" ? "\u2013" : value}</option>}
        {options.map((option) => (
          <option key={option.value} value={option.value}>
            {option.label}
          </option>
        ))}
      </select>
    </label>
  );
}

interface TextFieldProps {
  label: string;
  value: string;
  onChange: (value: string) => void;
  placeholder?: string;
  /** The "/" key focuses it. */
  isSearch?: boolean;
  size?: number;
  /** Delay after the last key before onChange is called; Enter calls it at once. */
  delayMs?: number;
}

/** A text field that reports its text a moment after the last key. */
export function TextField({ label, value, onChange, placeholder, isSearch, size, delayMs = 300 }: TextFieldProps): JSX.Element {
  const [text, setText] = useState(value);
  const timer = useRef(0);
  const typed = useRef(value);
  useEffect(() => {
    if (value !== typed.current) {
      typed.current = value;
      setText(value);
    }
  }, [value]);
  useEffect(() => () => window.clearTimeout(timer.current), []);
  const take = (next: string): void => {
    window.clearTimeout(timer.current);
    typed.current = next;
    onChange(next);
  };
  return (
    <label class="field inline">
      <span>{label}</span>
      <input
        type="search"
        data-search={isSearch === true ? "" : undefined}
        value={text}
        placeholder={placeholder}
        size={size ?? 20}
        spellcheck={false}
        autocomplete="off"
        onInput={(event) => {
          const next = event.currentTarget.value;
          setText(next);
          window.clearTimeout(timer.current);
          timer.current = window.setTimeout(() => take(next), delayMs);
        }}
        onKeyDown={(event) => {
          if (event.key === "Enter") {
            take(event.currentTarget.value);
          }
        }}
      />
    </label>
  );
}

interface SwitchProps {
  label: string;
  isOn: boolean;
  onChange: (isOn: boolean) => void;
  title?: string;
}

export function Switch({ label, isOn, onChange, title }: SwitchProps): JSX.Element {
  return (
    <label class="field inline switch" title={title}>
      <input type="checkbox" checked={isOn} onChange={(event) => onChange(event.currentTarget.checked)} />
      <span>{label}</span>
    </label>
  );
}

interface CopyButtonProps {
  /** The text to copy, or a function that returns it. */
  text: string | (() => string);
  children: ComponentChildren;
}

const MESSAGE_MS = 1500;

export function CopyButton({ text, children }: CopyButtonProps): JSX.Element {
  const [message, setMessage] = useState("");
  const copy = async (): Promise<void> => {
    flushLocation();
    const found = typeof text === "string" ? text : text();
    try {
      await navigator.clipboard.writeText(found);
      setMessage("copied");
    } catch {
      setMessage("clipboard not available"); // browsers offer it only on https and loopback pages
    }
    window.setTimeout(() => setMessage(""), MESSAGE_MS);
  };
  return (
    <button type="button" class="button small" onClick={() => void copy()}>
      {message === "" ? children : message}
      <span class="visually-hidden" role="status">
        {message}
      </span>
    </button>
  );
}

interface DownloadButtonProps {
  /** A resource of the API. */
  url: string;
  children: ComponentChildren;
}

/** Saves a resource of the API as a file. Shows the reason if the server refuses. */
export function DownloadButton({ url, children }: DownloadButtonProps): JSX.Element {
  const [isBusy, setIsBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const save = async (): Promise<void> => {
    setIsBusy(true);
    setProblem("");
    try {
      await download(url);
    } catch (error) {
      setProblem(asApiError(error).message);
    } finally {
      setIsBusy(false);
    }
  };
  return (
    <>
      <button type="button" class="button small" disabled={isBusy} onClick={() => void save()}>
        {children}
      </button>
      {problem === "" ? null : (
        <span class="section-note" role="alert">
          {problem}
        </span>
      )}
    </>
  );
}
