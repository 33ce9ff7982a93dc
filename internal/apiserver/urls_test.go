package apiserver_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/edgetest"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/tunnel"
	"github.com/kernflux/opendsec/internal/tunnel/join"
)

// inside has the edge's sandboxes answer on port 8000, all by the same server,
// and nothing on other ports.
func (c *cluster) inside(behind http.HandlerFunc) {
	c.t.Helper()
	server := httptest.NewServer(behind)
	c.t.Cleanup(server.Close)
	c.edges[0].SetHooks(edgetest.Hooks{Data: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, port, ok := strings.Cut(r.URL.Path, "/tunnel/")
		if !ok || r.Method != http.MethodPost {
			c.t.Errorf("the edge was asked for %s %s", r.Method, r.URL)
		}
		if port != "8000" {
			err := fault.New(fault.NotFound, "nothing listens on port %s", port)
			err.Field = "port"
			w.WriteHeader(http.StatusNotFound)
			_, _ = w.Write(fault.ToJSON(err))
			return
		}
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			c.t.Error(err)
			return
		}
		tunnel.Serve(w, r, conn, func(err error) *fault.Error { return fault.New(fault.Unavailable, "broke: %w", err) })
	})})
}

func (u *user) url(id string, port uint32, ttl *durationpb.Duration) (string, error) {
	res, err := u.sandboxes.GetURL(u.c.t.Context(), connect.NewRequest(&opendsecv1.GetURLRequest{Id: id, Port: port, Ttl: ttl}))
	if err != nil {
		return "", err
	}
	return res.Msg.GetUrl(), nil
}

func (u *user) mustURL(id string, port uint32) string {
	u.c.t.Helper()
	address, err := u.url(id, port, nil)
	if err != nil {
		u.c.t.Fatal(err)
	}
	return address
}

// visit asks for an address as one without a token does.
func (c *cluster) visit(address string) (int, string) {
	c.t.Helper()
	res, err := c.http.Get(address)
	if err != nil {
		c.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	return res.StatusCode, string(body)
}

func TestURLs(t *testing.T) {
	c := newCluster(t, 1)
	c.inside(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s %q", r.URL, r.Host, r.Header.Get("Opendsec-Request-Id"))
	})
	dev := c.developer()
	id, other := dev.mustCreate().GetId(), dev.mustCreate().GetId()
	address := dev.mustURL(id, 8000)
	if !strings.HasPrefix(address, c.url+"/p/"+id+"/8000/") || !strings.HasSuffix(address, "/") {
		t.Errorf("the address is %s", address)
	}
	if code, body := c.visit(address + "a?b=c"); code != http.StatusOK || body != `/a?b=c localhost:8000 ""` {
		t.Errorf("got %d %s", code, body)
	}
	second := strings.Replace(address, c.url, c.api(), 1)
	if code, _ := c.visit(second); code != http.StatusOK {
		t.Errorf("another API on the same records answers %d", code)
	}
	for what, bad := range map[string]string{
		"another sandbox": strings.Replace(address, id, other, 1),
		"another port":    strings.Replace(address, "/8000/", "/8001/", 1),
		"no token":        c.url + "/p/" + id + "/8000/",
		"a wrong token":   address[:len(address)-3] + "xx/",
	} {
		if code, body := c.visit(bad); code != http.StatusForbidden {
			t.Errorf("%s: got %d %s", what, code, body)
		}
	}
	if code, body := c.visit(dev.mustURL(id, 8001)); code != http.StatusBadGateway || !strings.Contains(body, "nothing listens on port 8001") {
		t.Errorf("a port on which nothing listens: got %d %s", code, body)
	}
	c.ahead.Store(int64(25 * time.Hour))
	if code, body := c.visit(address); code != http.StatusForbidden || !strings.Contains(body, "expired") {
		t.Errorf("a day later: got %d %s", code, body)
	}
	c.ahead.Store(0)
	if _, err := dev.stop(id); err != nil {
		t.Fatal(err)
	}
	if code, body := c.visit(address); code != http.StatusGone || !strings.Contains(body, "ended") {
		t.Errorf("after its end: got %d %s", code, body)
	}
	_, err := dev.url(id, 8000, nil)
	wantProblem(t, err, fault.SandboxEnded, "")
}

func (u *user) revoke(id, address string) error {
	_, err := u.sandboxes.RevokeURL(u.c.t.Context(), connect.NewRequest(&opendsecv1.RevokeURLRequest{Id: id, Url: address}))
	return err
}

// An address is taken back alone, at once on the server that was asked and soon
// on others.
func TestURLsAreRevoked(t *testing.T) {
	c := newCluster(t, 1)
	c.inside(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello") })
	dev := c.developer()
	id, other := dev.mustCreate().GetId(), dev.mustCreate().GetId()
	address, second := dev.mustURL(id, 8000), dev.mustURL(id, 8000)
	elsewhere := strings.Replace(address, c.url, c.api(), 1)
	for _, a := range []string{address, second, elsewhere} {
		if code, body := c.visit(a); code != http.StatusOK {
			t.Fatalf("before: %d %s", code, body)
		}
	}
	for _, x := range []struct {
		who         *user
		id, address string
		kind        fault.Kind
		field       string
	}{
		{dev, other, address, fault.InvalidArgument, "url"},
		{dev, id, "", fault.InvalidArgument, "url"},
		{dev, id, "https://example.com/", fault.InvalidArgument, "url"},
		{dev, id, "%", fault.InvalidArgument, "url"},
		{dev, id, address[:len(address)-3] + "xx/", fault.InvalidArgument, "url"},
		{dev, "sb-000000000000", address, fault.NotFound, "id"},
		{c.stranger(), id, address, fault.NotFound, "id"},
		{c.viewer(), id, address, fault.PermissionDenied, ""},
	} {
		wantProblem(t, x.who.revoke(x.id, x.address), x.kind, x.field)
	}
	for range 2 {
		if err := dev.revoke(id, address+"path?query"); err != nil {
			t.Fatal(err)
		}
	}
	if code, body := c.visit(address); code != http.StatusForbidden || !strings.Contains(body, "revoked") {
		t.Errorf("after it: %d %s", code, body)
	}
	if code, body := c.visit(second); code != http.StatusOK {
		t.Errorf("another address: %d %s", code, body)
	}
	eventually(t, "another server refuses it", func() bool { code, _ := c.visit(elsewhere); return code == http.StatusForbidden })
	if _, err := dev.stop(id); err != nil {
		t.Fatal(err)
	}
	if err := dev.revoke(id, second); err != nil {
		t.Errorf("after its sandbox ended: %v", err)
	}
}

// What is open by an address that is taken back ends, an answer that goes on and a
// WebSocket, at once on the server that was asked and soon on others. Others stay.
func TestRevokedURLsEndWhatIsOpen(t *testing.T) {
	c := newCluster(t, 1)
	c.inside(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
			fmt.Fprintln(w, "begun")
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return
		}
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(buf, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nbegun\n")
		buf.Flush()
		_, _ = io.Copy(io.Discard, buf)
	})
	dev := c.developer()
	id := dev.mustCreate().GetId()
	address, other := dev.mustURL(id, 8000), dev.mustURL(id, 8000)
	elsewhere := strings.Replace(address, c.url, c.api(), 1)
	if elsewhere == address {
		t.Fatalf("the second server is the first, %s", address)
	}
	ends := map[string]chan error{}
	for _, a := range []string{address, elsewhere, other} {
		for _, upgrade := range []string{"", "websocket"} {
			ends[a+" "+upgrade] = c.stay(a, upgrade)
		}
	}
	if err := dev.revoke(id, address); err != nil {
		t.Fatal(err)
	}
	for what, end := range ends {
		if strings.HasPrefix(what, other) {
			continue
		}
		select {
		case <-end:
		case <-time.After(10 * time.Second):
			t.Errorf("%s goes on", what)
		}
	}
	for what, end := range ends {
		if !strings.HasPrefix(what, other) {
			continue
		}
		select {
		case err := <-end:
			t.Errorf("%s ended: %v", what, err)
		default:
		}
	}
}

// One that has expired ends what is open by it, on other servers too.
func TestExpiredURLsAreRevoked(t *testing.T) {
	c := newCluster(t, 1)
	c.inside(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, "begun")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	dev := c.developer()
	id := dev.mustCreate().GetId()
	address, err := dev.url(id, 8000, durationpb.New(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	end := c.stay(strings.Replace(address, c.url, c.api(), 1), "")
	c.ahead.Store(int64(2 * time.Minute))
	if err := dev.revoke(id, address); err != nil {
		t.Fatal(err)
	}
	select {
	case <-end:
	case <-time.After(10 * time.Second):
		t.Error("what is open by an expired address goes on after it was revoked")
	}
}

// stay asks for an address, and tells when the answer, which has begun, ends.
func (c *cluster) stay(address, upgrade string) (end chan error) {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, address, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	if upgrade != "" {
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", upgrade)
	}
	res, err := c.http.Do(req)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { res.Body.Close() })
	if begun := make([]byte, 6); res.StatusCode != http.StatusOK && res.StatusCode != http.StatusSwitchingProtocols {
		c.t.Fatal(res.Status)
	} else if _, err := io.ReadFull(res.Body, begun); err != nil {
		c.t.Fatal(err)
	}
	end = make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, res.Body)
		end <- err
	}()
	return end
}

func TestURLsAreRefused(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	for _, x := range []struct {
		who   *user
		id    string
		port  uint32
		ttl   *durationpb.Duration
		kind  fault.Kind
		field string
	}{
		{dev, id, 0, nil, fault.InvalidArgument, "port"},
		{dev, id, 65536, nil, fault.InvalidArgument, "port"},
		{dev, id, 49983, nil, fault.InvalidArgument, "port"},
		{dev, id, 8000, durationpb.New(0), fault.InvalidArgument, "ttl"},
		{dev, id, 8000, durationpb.New(-time.Second), fault.InvalidArgument, "ttl"},
		{dev, id, 8000, durationpb.New(31 * 24 * time.Hour), fault.InvalidArgument, "ttl"},
		{dev, "sb-000000000000", 8000, nil, fault.NotFound, "id"},
		{dev, "", 8000, nil, fault.InvalidArgument, "id"},
		{c.stranger(), id, 8000, nil, fault.NotFound, "id"},
		{c.viewer(), id, 8000, nil, fault.PermissionDenied, ""},
	} {
		_, err := x.who.url(x.id, x.port, x.ttl)
		wantProblem(t, err, x.kind, x.field)
	}
	code, _ := c.visit(c.url + "/p/x")
	if code != http.StatusNotFound {
		t.Errorf("what is no address is answered %d", code)
	}
}

// With a domain each server has a name of its own, at which there is no API.
func TestURLsBelowADomain(t *testing.T) {
	c := newCluster(t, 1)
	c.domain = "sbx.test"
	named := c.api()
	c.inside(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.URL) })
	dev := c.developer()
	id := dev.mustCreate().GetId()
	c.url = named
	dev.connect()
	address := dev.mustURL(id, 8000)
	api, err := url.Parse(named)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(address)
	if err != nil || u.Host != "8000-"+id+".sbx.test:"+api.Port() {
		t.Fatalf("the address is %s, %v", address, err)
	}
	at := func(path string, header http.Header) (int, string) {
		req, err := http.NewRequest(http.MethodGet, named+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host, req.Header = u.Host, header
		res, err := c.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, _ := io.ReadAll(res.Body)
		return res.StatusCode, string(body)
	}
	if code, body := at(u.Path+"x", nil); code != http.StatusOK || body != "/x" {
		t.Errorf("got %d %s", code, body)
	}
	token := http.Header{"Authorization": {"Bearer " + dev.token}}
	for _, path := range []string{"/", "/healthz", "/sandboxes/" + id + "/health", "/p/" + id + "/8000/" + strings.TrimPrefix(u.Path, "/~")} {
		if code, body := at(path, token); code != http.StatusForbidden {
			t.Errorf("%s at a sandbox's name: got %d %s", path, code, body)
		}
	}
}

// A connection to a port goes through the data plane, over both versions of
// HTTP, to callers who may use the sandbox.
func TestTunnelsThroughTheDataPlane(t *testing.T) {
	c := newCluster(t, 1)
	c.inside(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello") })
	dev := c.developer()
	id := dev.mustCreate().GetId()
	http1 := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: c.roots()}}
	t.Cleanup(http1.CloseIdleConnections)
	open := func(via http.RoundTripper, who *user, id, port string) (*tunnel.Conn, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		return tunnel.Dial(ctx, via, c.url+"/sandboxes/"+id+"/tunnel/"+port, http.Header{"Authorization": {"Bearer " + who.token}})
	}
	for name, via := range map[string]http.RoundTripper{"HTTP/2": c.http.Transport, "HTTP/1.1": http1} {
		conn, err := open(via, dev, id, "8000")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n")
		if got, err := io.ReadAll(conn); err != nil || !strings.HasSuffix(string(got), "\r\n\r\nhello") {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
		join.Break(conn)
		_, err = open(via, dev, id, "8001")
		if f := fault.Of(err); f == nil || f.Kind != fault.NotFound || f.Field != "port" {
			t.Errorf("%s: where nothing listens: got %v", name, err)
		}
		for who, kind := range map[*user]fault.Kind{
			c.stranger(): fault.NotFound, c.viewer(): fault.PermissionDenied, {token: "ods_no"}: fault.Unauthenticated,
		} {
			if _, err := open(via, who, id, "8000"); !fault.Is(err, kind) {
				t.Errorf("%s: %s got %v, want %s", name, who.name, err, kind)
			}
		}
	}
	if _, err := dev.stop(id); err != nil {
		t.Fatal(err)
	}
	if _, err := open(http1, dev, id, "8000"); !fault.Is(err, fault.SandboxEnded) {
		t.Errorf("after its end: %v", err)
	}
}
