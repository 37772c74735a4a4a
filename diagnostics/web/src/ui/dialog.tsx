// A dialog of the browser's own: it keeps the focus inside, Escape closes it, and the rest of the page is inert meanwhile.

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
          onClose(); // beside it: the backdrop belongs to the element, its content does not
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
