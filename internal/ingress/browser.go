package ingress

import (
	"net/http"
	"strings"
	"time"
)

// cookieName is the cookie that lets a browser go on at a name of its own once
// it came there with a token. Browsers keep one of this form to the name that set
// it, so that no other can set or see it.
const cookieName = "__Host-opendsec"

// Admit returns the token by which a request may pass on to its server: that in
// its address, or at a name of its own that in its cookie. A browser that comes to such
// a name by an address is sent on without the token, with a cookie, so that the
// token stays in no history and goes to no other site; then done is true, and
// the request is answered.
func (k Key) Admit(w http.ResponseWriter, r *http.Request, v Visit, now time.Time) (by Token, done bool, err error) {
	token, byCookie := v.token, false
	if token == "" && v.host {
		if c, err := r.Cookie(cookieName); err == nil && ownDoing(r) {
			token, byCookie = c.Value, true
		}
	}
	if by, err = k.Check(token, v.Target, now); err != nil {
		return by, false, err
	}
	if !v.host || byCookie || !opensPage(r) {
		return by, false, nil
	}
	// It ends with the browser's session, and the token in it by itself.
	http.SetCookie(w, &http.Cookie{Name: cookieName, Value: token, Path: "/", Secure: true, HttpOnly: true, SameSite: http.SameSiteLaxMode})
	rest := v.rest
	for strings.HasPrefix(rest, "//") { // would name another host
		rest = rest[1:]
	}
	if rest == "" {
		rest = "/"
	}
	w.Header().Set("Referrer-Policy", "no-referrer")
	redirect(w, rest, r.URL.RawQuery)
	return by, true, nil
}

// opensPage reports whether a browser asks for a page to show.
func opensPage(r *http.Request) bool {
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Header.Get("Sec-Fetch-Mode") == "navigate"
}

// ownDoing reports whether a request that bears a cookie comes from the pages of
// the same server, or from a person. Pages of other sandboxes have names below
// the same domain, which browsers take for one site, so that their requests
// would bear the cookie too.
func ownDoing(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "same-origin", "none":
		return true
	case "": // no browser, or one that does not say
		o := r.Header.Get("Origin")
		return o == "" || o == origin(r)
	}
	return opensPage(r)
}

// takeCookie takes a cookie out of a request's header.
func takeCookie(h http.Header, name string) {
	lines := h.Values("Cookie")
	h.Del("Cookie")
	for _, line := range lines {
		var kept []string
		for part := range strings.SplitSeq(line, ";") {
			part = strings.TrimSpace(part)
			if n, _, _ := strings.Cut(part, "="); part != "" && n != name {
				kept = append(kept, part)
			}
		}
		if len(kept) > 0 {
			h.Add("Cookie", strings.Join(kept, "; "))
		}
	}
}

// cookie makes a cookie that a server sets one that goes back to that server
// alone, "" for one that it must not set.
func (v *Visit) cookie(set string) string {
	parts := strings.Split(set, ";")
	if name, _, _ := strings.Cut(parts[0], "="); strings.EqualFold(strings.TrimSpace(name), cookieName) {
		return ""
	}
	kept, path := parts[:1], "/"
	for _, p := range parts[1:] {
		name, value, _ := strings.Cut(strings.TrimSpace(p), "=")
		switch {
		case strings.EqualFold(name, "Domain"):
			continue
		case strings.EqualFold(name, "Path"):
			if strings.HasPrefix(value, "/") {
				path = value
			}
			continue
		}
		kept = append(kept, p)
	}
	return strings.Join(append(kept, " Path="+v.prefix+path), ";")
}

// pageRights is what pages may do that share the API's name: all but be of an
// origin that others have too.
const pageRights = "sandbox allow-downloads allow-forms allow-modals allow-popups allow-popups-to-escape-sandbox allow-scripts"

// confine keeps what a server sends under the API's name to itself. Its pages
// are of no origin, so what they fetch from their own server counts as foreign;
// who knows the address may have it, so that is allowed.
func confine(h http.Header, foreign bool) {
	h.Add("Content-Security-Policy", pageRights)
	h.Set("Referrer-Policy", "no-referrer")
	h.Del("Service-Worker-Allowed")
	if foreign {
		h.Set("Access-Control-Allow-Origin", "null")
		h.Add("Vary", "Origin")
	}
}

// preflight answers a browser that asks whether a page of no origin may send
// what it wants to its own server.
func preflight(w http.ResponseWriter, r *http.Request) bool {
	method := r.Header.Get("Access-Control-Request-Method")
	if r.Method != http.MethodOptions || method == "" || r.Header.Get("Origin") != "null" {
		return false
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "null")
	h.Set("Access-Control-Allow-Methods", method)
	if want := r.Header.Get("Access-Control-Request-Headers"); want != "" {
		h.Set("Access-Control-Allow-Headers", want)
	}
	h.Set("Vary", "Origin, Access-Control-Request-Method, Access-Control-Request-Headers")
	w.WriteHeader(http.StatusNoContent)
	return true
}
