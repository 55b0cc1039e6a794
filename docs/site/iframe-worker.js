// Search without a server. Browsers start no worker from a file: page, and the theme takes an iframe in its place where
// there is one by this name; it would else fetch one. Messages go both ways as a worker's do, without a copy.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      this.ready = new Promise(done => (script.onload = done))
      script.src = url
      inside.document.body.append(script)
      this.post = data => inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
    postMessage(data) { this.ready.then(() => this.post(data)) }
    terminate() {}
  }
  window.Worker = window.IFrameWorker
}
