package mtls_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"connectrpc.com/connect"

	iamv1 "github.com/kernflux/opendsec/api/gen/iam/v1"
	"github.com/kernflux/opendsec/api/gen/iam/v1/iamv1connect"
	"github.com/kernflux/opendsec/internal/ca"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/mtls"
)

// authority makes an authority with certificates for roles.
func authority(t *testing.T, roles ...string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	c, err := ca.Init(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range roles {
		if err := c.Ensure(r, []string{"127.0.0.1"}); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func load(t *testing.T, dir, role string) *mtls.Identity {
	t.Helper()
	id, err := mtls.Load(dir, role)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// serve serves a handler until the test's end and returns its address.
func serve(t *testing.T, cfg *tls.Config, h http.Handler) (address string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- daemon.Serve(ctx, daemon.Server{Listener: ln, TLS: cfg, Handler: h, Log: slog.New(slog.DiscardHandler)})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return ln.Addr().String()
}

func client(t *testing.T, cfg *tls.Config) *http.Client {
	t.Helper()
	c := daemon.Client(cfg)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// echo answers with the caller's role.
var echo = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	fmt.Fprint(w, mtls.RoleOfRequest(r))
})

func get(t *testing.T, c *http.Client, url string) (status int, body string, err error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(data), nil
}

func TestOnlyListedRolesGetThrough(t *testing.T) {
	dir := authority(t, mtls.RoleEdge, mtls.RoleAPIServer, mtls.RoleE2B)
	allow := mtls.Allow{
		"edge.v1.Edge":        {mtls.RoleAPIServer, mtls.RoleWatcher},
		"edge.v1.Edge/Secret": {mtls.RoleWatcher},
		"/sandboxes/":         {mtls.RoleAPIServer},
		"edge.v1.Closed":      {},
	}
	url := "https://" + serve(t, load(t, dir, mtls.RoleEdge).ServerConfig(), mtls.Handler(allow, echo))
	for _, c := range []struct {
		role, path string
		want       int
	}{
		{mtls.RoleAPIServer, "/edge.v1.Edge/Watch", http.StatusOK},
		{mtls.RoleAPIServer, "/edge.v1.Edge/Secret", http.StatusForbidden},
		{mtls.RoleAPIServer, "/sandboxes/sb-1/files", http.StatusOK},
		{mtls.RoleAPIServer, "/sandboxes", http.StatusForbidden},
		{mtls.RoleAPIServer, "/edge.v1.EdgeOther/Watch", http.StatusForbidden},
		{mtls.RoleAPIServer, "/edge.v1.Closed/Any", http.StatusForbidden},
		{mtls.RoleAPIServer, "/", http.StatusForbidden},
		{mtls.RoleE2B, "/edge.v1.Edge/Watch", http.StatusForbidden},
		{mtls.RoleE2B, "/sandboxes/sb-1/files", http.StatusForbidden},
		{mtls.RoleEdge, "/edge.v1.Edge/Watch", http.StatusForbidden},
	} {
		status, body, err := get(t, client(t, load(t, dir, c.role).ClientConfig(mtls.RoleEdge)), url+c.path)
		if err != nil || status != c.want {
			t.Errorf("%s asks for %s: %d, %v; want %d", c.role, c.path, status, err, c.want)
		}
		if status == http.StatusOK && body != c.role {
			t.Errorf("the handler saw role %q, want %q", body, c.role)
		}
	}
}

func TestStrangersAreRefused(t *testing.T) {
	ours, theirs := authority(t, mtls.RoleEdge, mtls.RoleAPIServer, mtls.RoleIAM), authority(t, mtls.RoleAPIServer, mtls.RoleEdge)
	url := "https://" + serve(t, load(t, ours, mtls.RoleEdge).ServerConfig(), mtls.Handler(mtls.Allow{"/": {mtls.RoleAPIServer}}, echo))
	good := load(t, ours, mtls.RoleAPIServer).ClientConfig(mtls.RoleEdge)

	nobody := good.Clone()
	nobody.Certificates = nil
	stranger := good.Clone()
	stranger.Certificates = load(t, theirs, mtls.RoleAPIServer).ClientConfig(mtls.RoleEdge).Certificates
	old := good.Clone()
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	// Of a certificate that the server refuses, the client learns after its own
	// part of the handshake, and at times no more than that the connection ended.
	for name, c := range map[string]struct {
		cfg  *tls.Config
		want string
	}{
		"no certificate":                {nobody, ""},
		"a certificate of another":      {stranger, ""},
		"an old protocol":               {old, "protocol version"},
		"wants another role":            {load(t, ours, mtls.RoleAPIServer).ClientConfig(mtls.RoleIAM), `names role "edge", want "iam"`},
		"believes in another authority": {load(t, theirs, mtls.RoleAPIServer).ClientConfig(mtls.RoleEdge), "unknown authority"},
	} {
		if status, _, err := get(t, client(t, c.cfg), url); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %d, %v; want an error with %q", name, status, err, c.want)
		}
	}
	if status, body, err := get(t, client(t, good), url); err != nil || body != mtls.RoleAPIServer {
		t.Errorf("the right one: %d, %q, %v", status, body, err)
	}
}

// The public listener wants no certificate, and what is behind a Handler stays
// closed to those who have none.
func TestPublicConfig(t *testing.T) {
	dir := authority(t, mtls.RoleAPIServer)
	id := load(t, dir, mtls.RoleAPIServer)
	mux := http.NewServeMux()
	mux.Handle("/open", echo)
	mux.Handle("/closed", mtls.Handler(mtls.Allow{"/": {mtls.RoleAPIServer, ""}}, echo))
	url := "https://" + serve(t, id.PublicConfig(), mux)
	cfg := id.ClientConfig(mtls.RoleAPIServer)
	cfg.Certificates = nil
	c := client(t, cfg)
	if status, body, err := get(t, c, url+"/open"); err != nil || status != http.StatusOK || body != "" {
		t.Errorf("open: %d, %q, %v", status, body, err)
	}
	if status, _, err := get(t, c, url+"/closed"); err != nil || status != http.StatusForbidden {
		t.Errorf("closed: %d, %v", status, err)
	}
}

// A refused RPC gets an error of its own protocol, with our detail.
func TestRefusalIsTyped(t *testing.T) {
	dir := authority(t, mtls.RoleIAM, mtls.RoleE2B)
	address := serve(t, load(t, dir, mtls.RoleIAM).ServerConfig(), mtls.Handler(mtls.Allow{}, echo))
	for name, option := range map[string]connect.ClientOption{
		"connect": connect.WithClientOptions(), "grpc": connect.WithGRPC(), "grpc-web": connect.WithGRPCWeb(), "json": connect.WithProtoJSON(),
	} {
		c := iamv1connect.NewAuthClient(client(t, load(t, dir, mtls.RoleE2B).ClientConfig(mtls.RoleIAM)), "https://"+address, option)
		_, err := c.Authenticate(t.Context(), connect.NewRequest(&iamv1.AuthenticateRequest{}))
		if err = fault.FromConnect(err); !fault.Is(err, fault.PermissionDenied) || !strings.Contains(err.Error(), `"e2b"`) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestLoadRefusesAnotherRole(t *testing.T) {
	dir := authority(t, mtls.RoleIAM)
	c, err := ca.Init(dir)
	if err != nil {
		t.Fatal(err)
	}
	cert, key, err := c.Issue(mtls.RoleEdge, nil)
	if err != nil {
		t.Fatal(err)
	}
	authority, err := os.ReadFile(c.CertFile())
	if err != nil {
		t.Fatal(err)
	}
	if id, err := mtls.New(authority, cert, key); err != nil || id.Role() != mtls.RoleEdge {
		t.Errorf("a certificate by itself: %v", err)
	}
	if _, err := mtls.Load(dir, mtls.RoleEdge); err == nil {
		t.Error("a role without a file was loaded")
	}
}
