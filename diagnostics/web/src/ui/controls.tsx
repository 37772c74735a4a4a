// Small controls: a choice of few or many, a text, a switch, copying.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";

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

/** A choice of a few, all in sight; arrow keys move it. */
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

/** A choice of many. */
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
  /** "/" goes to it. */
  isSearch?: boolean;
  size?: number;
  /** Taken so long after the last key; Enter takes it at once. */
  delayMs?: number;
}

/** A text that is taken a moment after the last key. */
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
  /** What is copied, or how it is found when it is asked for. */
  text: string | (() => string);
  children: ComponentChildren;
}

const SAID_MS = 1500;

export function CopyButton({ text, children }: CopyButtonProps): JSX.Element {
  const [said, setSaid] = useState("");
  const copy = async (): Promise<void> => {
    flushLocation();
    const found = typeof text === "string" ? text : text();
    try {
      await navigator.clipboard.writeText(found);
      setSaid("copied");
    } catch {
      setSaid("copying is not allowed here"); // a page that is not loopback and not https has no clipboard
    }
    window.setTimeout(() => setSaid(""), SAID_MS);
  };
  return (
    <button type="button" class="button small" onClick={() => void copy()}>
      {said === "" ? children : said}
      <span class="visually-hidden" role="status">
        {said}
      </span>
    </button>
  );
}
