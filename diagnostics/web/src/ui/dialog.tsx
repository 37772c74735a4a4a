// A native dialog element: the browser keeps the focus inside, closes it on Escape, and makes the rest of the page inert.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";

interface DialogProps {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
  className?: string;
}

export function Dialog({ title, onClose, children, className }: DialogProps): JSX.Element {
  const element = useRef<HTMLDialogElement>(null);
  const label = useId();

  useEffect(() => {
    const dialog = element.current;
    const before = document.activeElement;
    dialog?.showModal();
    return () => {
      dialog?.close();
      if (before instanceof HTMLElement && before.isConnected) {
        before.focus();
      }
    };
  }, []);

  return (
    <dialog
      ref={element}
      class={className === undefined ? "dialog" : `dialog ${className}`}
      aria-labelledby={label}
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
      onClick={(event) => {
        if (event.target === element.current) {
          onClose(); // a click on the backdrop has the dialog element itself as its target
        }
      }}
    >
      <div class="dialog-body">
        <header class="dialog-head">
          <h2 id={label}>{title}</h2>
          <button type="button" class="button quiet" onClick={onClose} aria-label="Close">
            {"\u00d7"}
          </button>
        </header>
        {children}
      </div>
    </dialog>
  );
}
