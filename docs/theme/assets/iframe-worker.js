// Search runs in a worker, which a browser refuses to pages that are opened as files: there a frame runs the same script.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true });
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = data => setTimeout(() => this.onmessage?.({ data }));
      this.ready = new Promise((done, failed) => {
        const script = Object.assign(this.frame.contentDocument.createElement("script"), { src: address });
        script.onload = done;
        script.onerror = failed;
        this.frame.contentDocument.head.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.onmessage({ data }), () => this.onerror?.());
    }
    terminate() {
      this.frame.remove();
    }
  };
}
