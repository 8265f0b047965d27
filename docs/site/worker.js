// Search from the file system. A browser refuses a worker whose script is a file, so there a frame does the worker's part:
// the frame runs the script, and messages of the page and of the script go between the two. Over http nothing changes.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      const page = inner.document;
      const load = (source) => new Promise((resolve, reject) => {
        const script = page.createElement("script");
        Object.assign(script, { src: source, onload: resolve, onerror: () => reject(new Error(source)) });
        page.head.append(script);
      });
      inner.postMessage = (data) => this.deliver(this, data);
      inner.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.ready = load(new URL(url, document.baseURI).href);
    }
    deliver(target, data) {
      const event = new MessageEvent("message", { data });
      target.dispatchEvent(event);
      if (target === this && this.onmessage) this.onmessage(event);
    }
    postMessage(data) {
      this.ready.then(() => this.deliver(this.frame.contentWindow, data));
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
