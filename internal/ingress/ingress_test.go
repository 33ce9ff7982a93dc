package ingress_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/ingress"
)

const (
	id     = "sb-abcdefghij01"
	other  = "sb-abcdefghij02"
	domain = "sbx.example.com"
)

var (
	key    = ingress.Key("a key of the test's own, 32 bytes")
	target = ingress.Target{Sandbox: id, Port: 8000}
	now    = time.Unix(1_800_000_000, 0)
)

func TestTokens(t *testing.T) {
	until := now.Add(time.Hour)
	token := key.Sign(target, until)
	if len(token) > 40 || url.PathEscape(token) != token {
		t.Errorf("the token %q does not go well into an address", token)
	}
	said, err := key.Check(token, target, until.Add(-time.Second))
	if err != nil || len(said.ID) != 16 || !said.Until.Equal(until) {
		t.Errorf("it says %+v, %v", said, err)
	}
	if late, err := key.Read(token, target); err != nil || late != said {
		t.Errorf("read without a look at the time it says %+v, %v", late, err)
	}
	if other, err := key.Read(key.Sign(target, until), target); err != nil || other.ID == said.ID {
		t.Errorf("another has the id %s too, %v", other.ID, err)
	}
	check := func(k ingress.Key, token string, t ingress.Target, now time.Time) error {
		_, err := k.Check(token, t, now)
		return err
	}
	bad := map[string]error{
		"expired":         check(key, token, target, until),
		"another port":    check(key, token, ingress.Target{Sandbox: id, Port: 8001}, now),
		"another sandbox": check(key, token, ingress.Target{Sandbox: other, Port: 8000}, now),
		"another key":     check(ingress.Key("another"), token, target, now),
		"no token":        check(key, "", target, now),
		"longer":          check(key, token+"A", target, now),
		"shorter":         check(key, token[:len(token)-1], target, now),
	}
	for i := range token {
		for _, c := range "AQgw_" {
			changed := token[:i] + string(c) + token[i+1:]
			if changed != token {
				bad[fmt.Sprintf("%q at %d", c, i)] = check(key, changed, target, now)
			}
		}
	}
	for what, err := range bad {
		if !fault.Is(err, fault.PermissionDenied) {
			t.Errorf("%s: got %v", what, err)
		}
		if err != nil && strings.Contains(err.Error(), token) {
			t.Errorf("%s: the error shows the token: %v", what, err)
		}
	}
}

func FuzzToken(f *testing.F) {
	f.Add(key.Sign(target, now))
	f.Fuzz(func(t *testing.T, token string) {
		if _, err := key.Check(token, target, now); err == nil {
			t.Errorf("%q is good", token)
		}
	})
}

func TestAddresses(t *testing.T) {
	for _, c := range []struct{ domain, host, want string }{
		{"", "127.0.0.1:7300", "https://127.0.0.1:7300/p/" + id + "/8000/TOKEN/"},
		{"", "[::1]:7300", "https://[::1]:7300/p/" + id + "/8000/TOKEN/"},
		{"", "api.example.com", "https://api.example.com/p/" + id + "/8000/TOKEN/"},
		{domain, "127.0.0.1:7300", "https://8000-" + id + "." + domain + ":7300/~TOKEN/"},
		{domain, "api.example.com", "https://8000-" + id + "." + domain + "/~TOKEN/"},
		{domain + ":443", "127.0.0.1:7300", "https://8000-" + id + "." + domain + ":443/~TOKEN/"},
	} {
		got := ingress.Address(target, "TOKEN", c.domain, c.host)
		if got != c.want {
			t.Errorf("below %q, by %s: got %s, want %s", c.domain, c.host, got, c.want)
		}
		r := httptest.NewRequest(http.MethodGet, got+"a%2Fb?c", nil)
		v, ok := ingress.Find(r, c.domain)
		if !ok || v.Target != target {
			t.Errorf("%s is found to be %v, %v", got, v.Target, ok)
		}
	}
}

func TestWhatIsNoAddress(t *testing.T) {
	for address, want := range map[string]bool{ // whether it is a visit, of nothing
		"https://api/healthz":                                false,
		"https://api/p":                                      false,
		"https://api/px/" + id:                               false,
		"https://sbx.example.com/":                           false,
		"https://8000-" + id + ".example.com/":               false,
		"https://8000-" + id + ".evilsbx.example.com/":       false,
		"https://8000-" + id + ".sbx.example.com.evil/":      false,
		"https://api/p/":                                     true,
		"https://api/p/" + id + "/0/t/":                      true,
		"https://api/p/" + id + "/65536/t/":                  true,
		"https://api/p/" + id + "/08000/t/":                  true,
		"https://api/p/" + id + "/-1/t/":                     true,
		"https://api/p/x/8000/t/":                            true,
		"https://api/p/127.0.0.1/8000/t/":                    true,
		"https://www.sbx.example.com/":                       true,
		"https://a.8000-" + id + ".sbx.example.com/":         true,
		"https://8000-" + id + "-x.sbx.example.com/":         true,
		"https://8000-" + id + "." + domain + "." + domain:   true,
		"https://api.SBX.example.COM/opendsec.v1.Service/Do": true,
	} {
		r := httptest.NewRequest(http.MethodGet, address, nil)
		v, ok := ingress.Find(r, domain)
		if ok != want || ok && v.Target != (ingress.Target{}) {
			t.Errorf("%s is found to be %v, %v", address, v.Target, ok)
		}
	}
	for domain, good := range map[string]bool{
		"": true, "a.b": true, "sbx.localhost": true, "a.b:443": true, "x-y.example.com": true,
		"localhost": false, "A.b": false, ".a.b": false, "a..b": false, "*.a.b": false, "a.b:": false, "a.b:0": false, "a.b:x": false,
		"https://a.b": false, "a.b/": false, "a_b.c": false, strings.Repeat("a.", 120) + "a": false,
	} {
		if err := ingress.CheckDomain(domain); (err == nil) != good {
			t.Errorf("domain %q: %v", domain, err)
		}
	}
}

// front is a server with both forms of addresses, and one server behind it.
type front struct {
	*httptest.Server
	t    *testing.T
	fail error // of the next dial
}

func newFront(t *testing.T, behind http.HandlerFunc) *front {
	server := httptest.NewServer(behind)
	t.Cleanup(server.Close)
	f := &front{t: t}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	proxy := ingress.New(func(ctx context.Context, to ingress.Target) (net.Conn, error) {
		if to != target {
			t.Errorf("asked for %v", to)
		}
		if f.fail != nil {
			return nil, f.fail
		}
		return (&net.Dialer{}).DialContext(ctx, "tcp", server.Listener.Addr().String())
	}, log)
	f.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v, ok := ingress.Find(r, domain)
		if !ok {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		_, done, err := key.Admit(w, r, v, now)
		switch {
		case err != nil:
			proxy.Refuse(w, err)
		case !done:
			proxy.Serve(w, r, v)
		}
	}))
	t.Cleanup(f.Close)
	f.Client().CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	transport := f.Client().Transport.(*http.Transport)
	transport.TLSClientConfig.ServerName = "example.com" // the certificate's
	transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", f.Listener.Addr().String())
	}
	return f
}

// forms are the addresses of the target, by what they are called.
func forms() map[string]string {
	token := key.Sign(target, now.Add(time.Hour))
	return map[string]string{
		"path": ingress.Address(target, token, "", "api.test"),
		"name": ingress.Address(target, token, domain, "api.test"),
	}
}

// ask sends a request with headers, given as name and value in turn.
func (f *front) ask(method, address, body string, headers ...string) (*http.Response, string) {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), method, address, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	res, err := f.Client().Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer res.Body.Close()
	got, err := io.ReadAll(res.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return res, string(got)
}

func TestTheServerSeesWhatIsItsAffair(t *testing.T) {
	var saw *http.Request
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) {
		saw = r
		_, _ = io.Copy(w, r.Body)
	})
	for form, address := range forms() {
		u, _ := url.Parse(address)
		_, got := f.ask(http.MethodPut, address+"a%2Fb/../c?x=%zz&y;z", "the body",
			"Cookie", "a=b; __Host-opendsec=secret; c=d", "Authorization", "Bearer ods_secret",
			"Origin", "https://"+u.Host, "Referer", address+"page?q=1", "X-Forwarded-For", "6.6.6.6", "X-Forwarded-Host", "evil",
			"Forwarded", "for=6.6.6.6", "X-Mine", "mine")
		if got != "the body" || saw.Method != http.MethodPut {
			t.Errorf("%s: got %q", form, got)
		}
		if saw.RequestURI != "/a%2Fb/../c?x=%zz&y;z" || saw.Host != "localhost:8000" {
			t.Errorf("%s: the server was asked for %s at %s", form, saw.RequestURI, saw.Host)
		}
		want := map[string]string{
			"Cookie": "a=b; c=d", "Authorization": "", "Origin": "http://localhost:8000", "Referer": "http://localhost:8000/page?q=1",
			"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": u.Host, "X-Forwarded-Proto": "https", "Forwarded": "", "X-Mine": "mine",
		}
		for name, value := range want {
			if got := strings.Join(saw.Header.Values(name), "|"); got != value {
				t.Errorf("%s: the server saw %s: %q, want %q", form, name, got, value)
			}
		}
		if shown := fmt.Sprint(saw.Header, saw.RequestURI, saw.Host); strings.Contains(shown, "secret") || strings.Contains(shown, key.Sign(target, now.Add(time.Hour))) {
			t.Errorf("%s: the server saw a secret: %s", form, shown)
		}
		for _, credentials := range []string{"bearer ods_secret", "BEARER  ods_secret"} {
			f.ask(http.MethodGet, address, "", "Authorization", "Basic YTpi", "Authorization", credentials)
			if got := saw.Header.Values("Authorization"); len(got) > 0 {
				t.Errorf("%s: the server saw %q", form, got)
			}
		}
		f.ask(http.MethodGet, address, "", "Authorization", "Basic YTpi", "Origin", "https://elsewhere", "Referer", "https://elsewhere/x")
		if saw.Header.Get("Authorization") == "" || saw.Header.Get("Origin") != "https://elsewhere" || saw.Header.Get("Referer") != "https://elsewhere/x" {
			t.Errorf("%s: the server saw %v", form, saw.Header)
		}
	}
}

func TestWhatTheServerSaysOfItself(t *testing.T) {
	var header http.Header
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) {
		for name, values := range header {
			w.Header()[name] = values
		}
		w.WriteHeader(http.StatusFound)
	})
	for form, address := range forms() {
		u, _ := url.Parse(address)
		for to, want := range map[string]string{
			"/x?y=1":                       u.Path + "x?y=1",
			"x":                            "x",
			"?q":                           "?q",
			"http://localhost:8000/x":      u.Path + "x",
			"http://127.0.0.1:8000":        u.Path,
			"//localhost:8000/x":           u.Path + "x",
			"http://localhost:9000/x":      "http://localhost:9000/x",
			"https://" + u.Host + "/a%2Fb": u.Path + "a%2Fb",
			"https://elsewhere/x":          "https://elsewhere/x",
			"//elsewhere/x":                "//elsewhere/x",
			"http://[::1]:8000/":           u.Path,
		} {
			header = http.Header{"Location": {to}}
			if res, _ := f.ask(http.MethodGet, address, ""); res.Header.Get("Location") != want {
				t.Errorf("%s: a redirect to %s goes to %s, want %s", form, to, res.Header.Get("Location"), want)
			}
		}
		header = http.Header{"Set-Cookie": {
			"a=b; Domain=example.com; Path=/x; Secure; SameSite=None", "c=d", "e=f;path=/;HttpOnly", "g=h; Path=bad",
			"__Host-opendsec=mine; Path=/; Secure", "__HOST-OpenDsec=mine",
		}, "Clear-Site-Data": {`"*"`}, "Strict-Transport-Security": {"max-age=1; includeSubDomains"}, "Alt-Svc": {"h3"},
			"Nel": {`{"report_to":"x","max_age":9}`}, "Report-To": {`{"group":"x","max_age":9,"endpoints":[{"url":"https://elsewhere/"}]}`}}
		res, _ := f.ask(http.MethodGet, address, "")
		want := []string{
			"a=b; Secure; SameSite=None; Path=" + u.Path + "x", "c=d; Path=" + u.Path, "e=f;HttpOnly; Path=" + u.Path, "g=h; Path=" + u.Path,
		}
		if d := cmp.Diff(want, res.Header.Values("Set-Cookie")); d != "" {
			t.Errorf("%s: cookies (-want +got):\n%s", form, d)
		}
		for _, name := range []string{"Clear-Site-Data", "Strict-Transport-Security", "Alt-Svc", "NEL", "Report-To"} {
			if res.Header.Get(name) != "" {
				t.Errorf("%s: %s came through", form, name)
			}
		}
	}
}

// What comes before an answer is not looked through, so it does not come through.
func TestEarlyHintsAreKeptBack(t *testing.T) {
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Set-Cookie", "a=b; Path=/")
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Set-Cookie")
		_, _ = io.Copy(w, r.Body)
	})
	for form, address := range forms() {
		early := 0
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
			Got1xxResponse: func(int, textproto.MIMEHeader) error { early++; return nil },
		})
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, address, strings.NewReader("the body"))
		if err != nil {
			t.Fatal(err)
		}
		res, err := f.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || string(got) != "the body" || early != 0 || res.Header.Get("Set-Cookie") != "" {
			t.Errorf("%s: %d answers before %q with %v, %v", form, early, got, res.Header, err)
		}
	}
}

// A server on port 80 leaves the port out.
func TestRedirectsOfPort80(t *testing.T) {
	to := ingress.Target{Sandbox: target.Sandbox, Port: 80}
	server := httptest.NewServer(http.RedirectHandler("http://localhost/x", http.StatusFound))
	t.Cleanup(server.Close)
	proxy := ingress.New(func(ctx context.Context, _ ingress.Target) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", server.Listener.Addr().String())
	}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	address := ingress.Address(to, "token", "", "api.test")
	r := httptest.NewRequest(http.MethodGet, address, nil)
	v, _ := ingress.Find(r, "")
	w := httptest.NewRecorder()
	proxy.Serve(w, r, v)
	if got, want := w.Header().Get("Location"), r.URL.Path+"x"; got != want {
		t.Errorf("a redirect goes to %q, want %q", got, want)
	}
}

// Pages below the API's name are of no origin, whatever the server says.
func TestPagesBelowOneNameAreConfined(t *testing.T) {
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", "default-src *")
		w.Header().Set("Service-Worker-Allowed", "/")
		w.Header().Set("Referrer-Policy", "unsafe-url")
		fmt.Fprint(w, r.Header.Get("Origin"))
	})
	address := forms()["path"]
	res, _ := f.ask(http.MethodGet, address, "")
	policies := res.Header.Values("Content-Security-Policy")
	if len(policies) != 2 || !strings.HasPrefix(policies[1], "sandbox ") || strings.Contains(policies[1], "allow-same-origin") {
		t.Errorf("policies: %q", policies)
	}
	if res.Header.Get("Service-Worker-Allowed") != "" || res.Header.Get("Referrer-Policy") != "no-referrer" || res.Header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("got %v", res.Header)
	}
	res, body := f.ask(http.MethodGet, address, "", "Origin", "null")
	if res.Header.Get("Access-Control-Allow-Origin") != "null" || res.Header.Get("Vary") != "Origin" || body != "http://localhost:8000" {
		t.Errorf("its own page is answered %v, and seen as %q", res.Header, body)
	}
	res, _ = f.ask(http.MethodOptions, address+"x", "", "Origin", "null", "Access-Control-Request-Method", "PUT", "Access-Control-Request-Headers", "x-a")
	if res.StatusCode != http.StatusNoContent || res.Header.Get("Access-Control-Allow-Methods") != "PUT" || res.Header.Get("Access-Control-Allow-Headers") != "x-a" {
		t.Errorf("its own page that asks first is answered %s %v", res.Status, res.Header)
	}
	res, _ = f.ask(http.MethodOptions, address+"x", "", "Origin", "https://elsewhere", "Access-Control-Request-Method", "PUT")
	if res.StatusCode != http.StatusOK || res.Header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("another page that asks first is answered %s %v", res.Status, res.Header)
	}
	res, _ = f.ask(http.MethodGet, forms()["name"], "", "Origin", "null")
	if len(res.Header.Values("Content-Security-Policy")) != 1 || res.Header.Get("Access-Control-Allow-Origin") != "" || res.Header.Get("Service-Worker-Allowed") != "/" {
		t.Errorf("at a name of its own: %v", res.Header)
	}
}

// A browser at a name of its own goes on with a cookie, which no other page can
// use.
func TestACookieForOneName(t *testing.T) {
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.URL, r.Header["Cookie"]) })
	address := forms()["name"]
	u, _ := url.Parse(address)
	base := "https://" + u.Host
	res, _ := f.ask(http.MethodGet, address+"a/b?c", "", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Site", "none")
	cookies := res.Cookies()
	if res.StatusCode != http.StatusTemporaryRedirect || res.Header.Get("Location") != "/a/b?c" || len(cookies) != 1 {
		t.Fatalf("got %s, %v", res.Status, res.Header)
	}
	c := cookies[0]
	if c.Name != "__Host-opendsec" || !c.Secure || !c.HttpOnly || c.Path != "/" || c.Domain != "" || c.SameSite != http.SameSiteLaxMode {
		t.Errorf("the cookie is %v", c)
	}
	res, _ = f.ask(http.MethodGet, strings.TrimSuffix(address, "/")+"//elsewhere/x", "", "Sec-Fetch-Mode", "navigate")
	if to := res.Header.Get("Location"); to != "/elsewhere/x" {
		t.Errorf("it is sent to %s", to)
	}
	cookie := c.Name + "=" + c.Value
	for _, c := range []struct {
		method  string
		headers []string
		good    bool
	}{
		{http.MethodPost, []string{"Sec-Fetch-Site", "same-origin", "Sec-Fetch-Mode", "cors"}, true},
		{http.MethodGet, []string{"Sec-Fetch-Site", "none", "Sec-Fetch-Mode", "navigate"}, true},
		{http.MethodGet, []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, true},
		{http.MethodGet, nil, true},
		{http.MethodPost, []string{"Origin", base}, true},
		{http.MethodPost, []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate"}, false},
		{http.MethodGet, []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "no-cors"}, false},
		{http.MethodGet, []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "websocket"}, false},
		{http.MethodPost, []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "cors"}, false},
		{http.MethodGet, []string{"Origin", "https://9000-" + other + "." + domain}, false},
		{http.MethodPost, []string{"Origin", "null"}, false},
	} {
		res, body := f.ask(c.method, base+"/x", "", append([]string{"Cookie", cookie + "; own=1"}, c.headers...)...)
		if good := res.StatusCode == http.StatusOK; good != c.good || good && body != "/x [own=1]" {
			t.Errorf("%s with %q: got %s %s", c.method, c.headers, res.Status, body)
		}
	}
	for _, bad := range []string{
		"https://8001-" + id + "." + domain, "https://8000-" + other + "." + domain, "https://api.test/p/" + id + "/8000//",
	} {
		if res, _ := f.ask(http.MethodGet, bad+"/x", "", "Cookie", cookie); res.StatusCode != http.StatusForbidden {
			t.Errorf("with the cookie of another at %s: got %s", bad, res.Status)
		}
	}
}

func TestNamesWithoutASlash(t *testing.T) {
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.URL) })
	for form, address := range forms() {
		u, _ := url.Parse(address)
		res, _ := f.ask(http.MethodGet, strings.TrimSuffix(address, "/")+"?q", "")
		if res.StatusCode != http.StatusTemporaryRedirect || res.Header.Get("Location") != u.Path+"?q" {
			t.Errorf("%s: got %s to %s", form, res.Status, res.Header.Get("Location"))
		}
	}
}

func TestUpgrades(t *testing.T) {
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) {
		c, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\nX-Saw: %s %s\r\n\r\n",
			r.Header.Get("Upgrade"), r.URL, r.Header.Get("Origin"))
		_, _ = io.Copy(c, buffered)
	})
	for form, address := range forms() {
		u, _ := url.Parse(address)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address+"ws?x=1", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header = http.Header{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Origin": {"https://" + u.Host}}
		res, err := f.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if res.StatusCode != http.StatusSwitchingProtocols || res.Header.Get("X-Saw") != "/ws?x=1 http://localhost:8000" {
			t.Fatalf("%s: got %s, %v", form, res.Status, res.Header)
		}
		c := res.Body.(io.ReadWriteCloser)
		r := bufio.NewReader(c)
		for _, line := range []string{"one\n", "two\n"} {
			if _, err := io.WriteString(c, line); err != nil {
				t.Fatal(err)
			}
			if got, err := r.ReadString('\n'); err != nil || got != line {
				t.Errorf("%s: got %q, %v", form, got, err)
			}
		}
		c.Close()
	}
}

// What cannot be had has a status and a word that say why.
func TestErrors(t *testing.T) {
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) })
	none := fault.New(fault.NotFound, "nothing listens on port 8000")
	none.Field = "port"
	for _, c := range []struct {
		fail   error
		status int
		word   string
	}{
		{nil, http.StatusBadGateway, "broke off"},
		{none, http.StatusBadGateway, "nothing listens on port 8000"},
		{fault.New(fault.NotFound, "no such sandbox"), http.StatusNotFound, "no such sandbox"},
		{fault.New(fault.SandboxEnded, "it has ended"), http.StatusGone, "it has ended"},
		{fault.New(fault.WrongState, "it is paused"), http.StatusServiceUnavailable, "it is paused"},
		{fault.New(fault.Capacity, "no room"), http.StatusServiceUnavailable, "no room"},
		{fault.New(fault.Internal, "a secret"), http.StatusInternalServerError, "log"},
		{errors.New("odd"), http.StatusBadGateway, "odd"},
	} {
		f.fail = c.fail
		for form, address := range forms() {
			res, body := f.ask(http.MethodGet, address, "")
			if res.StatusCode != c.status || !strings.Contains(body, c.word) || strings.Contains(body, "a secret") {
				t.Errorf("%s, %v: got %s %q", form, c.fail, res.Status, body)
			}
			if res.Header.Get("Cache-Control") != "no-store" || res.Header.Get("X-Content-Type-Options") != "nosniff" {
				t.Errorf("%s: got %v", form, res.Header)
			}
		}
	}
}

// What comes piece by piece goes on piece by piece, and who leaves is missed.
func TestStreams(t *testing.T) {
	left := make(chan struct{})
	next := make(chan string)
	f := newFront(t, func(w http.ResponseWriter, r *http.Request) {
		for piece := range next {
			fmt.Fprint(w, piece)
			_ = http.NewResponseController(w).Flush()
		}
		<-r.Context().Done()
		close(left)
	})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, forms()["path"], nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() { next <- "first" }()
	res, err := f.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	for i, piece := range []string{"first", "again"} {
		if i > 0 {
			next <- piece
		}
		got := make([]byte, 5)
		if _, err := io.ReadFull(res.Body, got); err != nil || string(got) != piece {
			t.Fatalf("got %q, %v", got, err)
		}
	}
	close(next)
	res.Body.Close()
	<-left
}
