package agent_test

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// httpClient is what Connect's clients send with.
type httpClient struct{ transport http.RoundTripper }

func (c *httpClient) Do(r *http.Request) (*http.Response, error) { return c.transport.RoundTrip(r) }

// frame is a message of a stream as E2B's clients send it.
func frame(message string) []byte {
	out := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))
	return append(out, message...)
}

// stream calls a streaming method as E2B's clients do: JSON over HTTP/1.1.
func (r *running) stream(method string, header map[string]string, body io.Reader) *http.Response {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), "POST", "http://agent"+method, body)
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("X-Access-Token", token)
	req.Header.Set("Content-Type", "application/connect+json")
	req.Header.Set("Accept-Encoding", "zstd,gzip,br")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	conn, err := r.dial(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	go req.Write(conn) // its body may have no end
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		r.t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp
}

// next reads one frame.
func next(t *testing.T, body io.Reader) (flags byte, message map[string]any) {
	t.Helper()
	var head [5]byte
	if _, err := io.ReadFull(body, head[:]); err != nil {
		t.Fatal(err)
	}
	data := make([]byte, binary.BigEndian.Uint32(head[1:]))
	if _, err := io.ReadFull(body, data); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &message); err != nil {
		t.Fatalf("%q: %v", data, err)
	}
	return head[0], message
}

func TestStartAsE2BClientsCallIt(t *testing.T) {
	r := start(t)
	resp := r.stream("/process.Process/Start", map[string]string{"Authorization": "Basic " + base64.StdEncoding.EncodeToString([]byte("nobody:")), "Keepalive-Ping-Interval": "1", "Connect-Timeout-Ms": "60000"},
		bytes.NewReader(frame(`{"process":{"cmd":"/bin/sh","args":["-c","printf '\\377%s' $USER; printf e >&2; sleep 1.5; exit 3"],"envs":{},"unknown":1},"stdin":false}`)))
	defer resp.Body.Close()
	if resp.StatusCode != 200 || resp.Header.Get("Content-Encoding") != "" || resp.Header.Get("Content-Type") != "application/connect+json" {
		t.Fatalf("%s %v", resp.Status, resp.Header)
	}
	_, first := next(t, resp.Body)
	if pid := first["event"].(map[string]any)["start"].(map[string]any)["pid"]; pid == nil {
		t.Errorf("the first frame is %v", first)
	}
	data := map[string]string{}
	var keepalives int
	for {
		flags, m := next(t, resp.Body)
		event, _ := m["event"].(map[string]any)
		if d, ok := event["data"].(map[string]any); ok {
			for stream, text := range d {
				b, err := base64.StdEncoding.DecodeString(text.(string))
				if err != nil {
					t.Fatal(err)
				}
				data[stream] += string(b)
			}
			continue
		}
		if _, ok := event["keepalive"]; ok {
			keepalives++
			continue
		}
		end := map[string]any{"event": map[string]any{"end": map[string]any{"exitCode": 3.0, "exited": true, "status": "exit status 3", "error": "exit status 3"}}}
		if diff := cmp.Diff(end, m); diff != "" || flags != 0 {
			t.Errorf("the end (-want +got):\n%s", diff)
		}
		break
	}
	if flags, m := next(t, resp.Body); flags != 2 || len(m) != 0 {
		t.Errorf("the last frame has the flags %d and holds %v", flags, m)
	}
	if diff := cmp.Diff(map[string]string{"stdout": "\xffnobody", "stderr": "e"}, data); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
	if keepalives == 0 {
		t.Error("no sign of life in a silent second")
	}
}

func TestDeadlineHasNoEndEvent(t *testing.T) {
	r := start(t)
	resp := r.stream("/process.Process/Start", map[string]string{"Connect-Timeout-Ms": "150"}, bytes.NewReader(frame(`{"process":{"cmd":"/bin/sleep","args":["60"]}}`)))
	defer resp.Body.Close()
	next(t, resp.Body)
	flags, m := next(t, resp.Body)
	if e, _ := m["error"].(map[string]any); flags != 2 || e["code"] != "deadline_exceeded" {
		t.Errorf("after the start came %d %v, want the error alone", flags, m)
	}
}

// On HTTP/1.1 an answer before the request's end must not wait for that end.
func TestStreamInputFailsAtOnce(t *testing.T) {
	r := start(t)
	pr, pw := io.Pipe()
	defer pw.Close()
	go pw.Write(frame(`{"start":{"process":{"pid":1073741824}}}`))
	resp := r.stream("/process.Process/StreamInput", nil, pr)
	defer resp.Body.Close()
	flags, m := next(t, resp.Body)
	if e, _ := m["error"].(map[string]any); flags != 2 || e["code"] != "not_found" {
		t.Errorf("got %d %v", flags, m)
	}
}

func TestRefusalsAsE2BClientsReadThem(t *testing.T) {
	r := start(t)
	for name, tt := range map[string]struct {
		path   string
		header map[string]string
		status int
		code   any
	}{
		"no token":     {"/filesystem.Filesystem/Stat", map[string]string{"X-Access-Token": ""}, 401, 401.0},
		"missing":      {"/filesystem.Filesystem/Stat", nil, 404, "not_found"},
		"no terminals": {"/process.Process/Update", nil, 501, "unimplemented"},
		"user":         {"/filesystem.Filesystem/Stat", map[string]string{"Authorization": "Basic bm9uZTo="}, 401, "unauthenticated"},
	} {
		t.Run(name, func(t *testing.T) {
			header := map[string]string{"Content-Type": "application/json"}
			for k, v := range tt.header {
				header[k] = v
			}
			resp := r.stream(tt.path, header, strings.NewReader(`{"path":"/no/such"}`))
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			var e map[string]any
			if err := json.Unmarshal(body, &e); err != nil || resp.StatusCode != tt.status || e["code"] != tt.code {
				t.Errorf("%s %s, want %d and %v", resp.Status, body, tt.status, tt.code)
			}
		})
	}
}

func TestTerminalsAreNotThereYet(t *testing.T) {
	r := start(t)
	resp := r.stream("/process.Process/Start", nil, bytes.NewReader(frame(`{"process":{"cmd":"/bin/sh"},"pty":{"size":{"cols":80,"rows":24}}}`)))
	defer resp.Body.Close()
	if flags, m := next(t, resp.Body); flags != 2 || fmt.Sprint(m["error"].(map[string]any)["code"]) != "unimplemented" {
		t.Errorf("got %d %v", flags, m)
	}
}
